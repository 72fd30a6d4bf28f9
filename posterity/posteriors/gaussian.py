"""A Gaussian over weights."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from posterity.model.density import Density
from posterity.model.inputs import Inputs
from posterity.model.joint import Joint
from posterity.model.network import Buffers
from posterity.numerics.precision import Precision
from posterity.numerics.random import Key
from posterity.posteriors.posterior import Posterior


@dataclass(frozen=True, eq=False)
class Gaussian(Posterior):
    """N(mean, precision^-1) over the random weights; the other weights stay at the mean.

    **Math**: w = mean + L^-T eps with precision = L L^T, eps ~ N(0, I); predictions average p(y | f_w(x)) over draws.

    **Limit**: exact for linear models with Gaussian noise; otherwise as good as a Gaussian in weight space is.
    Draws of a network's weights from a Laplace posterior often underfit: see `Linearized`.

    **Cost**: one forward pass for each draw.

    **References**: MacKay (1992); Ritter et al. (2018), section 3.

    **Example**:

    >>> from posterity.likelihoods import Bernoulli
    >>> from posterity.numerics import Dense, Key
    >>> from posterity.priors import Normal
    >>> joint = Joint(torch.nn.Linear(1, 1, bias=False), Bernoulli(), Normal(), num_data=1)
    >>> q = Gaussian(joint, torch.zeros(1), Dense(torch.tensor([[4.0]])))
    >>> bool((q.sample(10_000, Key(0)).std() - 0.5).abs() < 0.02)
    True
    """

    joint: Joint | Density
    mean: Tensor
    precision: Precision
    buffers: Buffers = field(default_factory=dict)
    log_evidence: Tensor | None = None
    data_terms: Tensor | None = (
        None  # log-likelihood at the mean; squared residuals and their number for Gaussian noise
    )

    @property
    def num_members(self) -> int | None:
        """M for a mean (M, P)."""
        return self.mean.shape[0] if self.mean.dim() > 1 else None

    def member(self, index: int) -> "Gaussian":
        """The Gaussian of one member."""
        if self.num_members is None:
            return self
        return Gaussian(
            self.joint.member(index),
            self.mean[index],
            self.precision.member(index),
            {name: b[index] for name, b in self.buffers.items()},
            None if self.log_evidence is None else self.log_evidence[index],
            None if self.data_terms is None else self.data_terms[index],
        )

    @property
    def variance(self) -> Tensor:
        """Variance of each random weight, (R,), in float64."""
        return self.precision.variance()

    def point(self) -> Tensor:
        """The mean."""
        return self.mean

    def deviations(self, draws: int, key: Key) -> Tensor:
        """Draws of w - mean for the random weights, (draws, R), in float64."""
        self._alone()
        noise = key.normal((draws, self.precision.size), torch.float64, self.mean.device)
        return self.precision.colour(noise)

    def sample(self, draws: int, key: Key) -> Tensor:
        """mean + deviations, (draws, P)."""
        deviations = self.deviations(draws, key).to(self.mean.dtype)
        index = self.joint.random_indices
        if index is None:
            return self.mean + deviations
        return self.mean.expand(draws, -1).clone().index_add_(1, index, deviations)

    def outputs(self, inputs: Inputs, draws: int, key: Key) -> Tensor:
        """One forward pass for each draw."""
        assert isinstance(self.joint, Joint)
        joint, buffers = self.joint, self.buffers or None
        return torch.stack([joint.outputs(theta, inputs, buffers) for theta in self.sample(draws, key)])
