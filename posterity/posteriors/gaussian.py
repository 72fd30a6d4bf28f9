"""Gaussian posteriors over weights."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from posterity.model.batch import Inputs, named_tensors, num_rows
from posterity.model.joint import Joint
from posterity.model.network import Buffers
from posterity.model.problem import Problem
from posterity.numerics.random import Key
from posterity.posteriors.posterior import Posterior
from posterity.precisions.diagonal import Diagonal
from posterity.precisions.precision import Precision

# Numbers that are drawn at a time: few enough to stay in a processor's cache until they are used.
LARGE = {"cpu": 1 << 19, "cuda": 1 << 26}
# Rows times draws that one pass takes: a processor is busy with one draw, and a GPU has room for their activations.
AT_ONCE = {"cpu": 1, "cuda": 1 << 16}
# Numbers of all these rows: large ones, images, have activations in proportion, and a batch size may be there for them.
NUMBERS_AT_ONCE = 1 << 25


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
    >>> from posterity.precisions import Dense
    >>> from posterity.numerics import Key
    >>> from posterity.priors import Normal
    >>> joint = Joint(torch.nn.Linear(1, 1, bias=False), Bernoulli(), Normal(), num_data=1)
    >>> q = Gaussian(joint, torch.zeros(1), Dense(torch.tensor([[4.0]])))
    >>> bool((q.sample(10_000, Key(0)).std() - 0.5).abs() < 0.02)
    True
    """

    joint: Problem
    mean: Tensor
    precision: Precision
    buffers: Buffers = field(default_factory=dict)
    log_evidence: Tensor | None = None
    data_terms: Tensor | None = (
        None  # log-likelihood at the mean; squared residuals and their number for Gaussian noise
    )

    @property
    def num_members(self) -> int | None:
        return self.mean.shape[0] if self.mean.dim() > 1 else None

    def member(self, index: int) -> "Gaussian":
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
        return self.mean

    def deviations(self, draws: int, key: Key, dtype: torch.dtype = torch.float64) -> Tensor:
        """Draws of w - mean for the random weights, (draws, R)."""
        self._alone()
        return torch.cat(list(self._some(draws, key, self.mean.to(dtype))))

    def _some(self, draws: int, key: Key, like: Tensor, *, passing: bool = False) -> Iterator[Tensor]:
        """The deviations in the number type of `like`, as many draws at a time as are not too large together.

        With `passing` the next ones may take the place of these, so that memory is not asked for each time.
        """
        size = self.precision.size
        step = max(1, LARGE.get(like.device.type, LARGE["cpu"]) // max(1, size))
        space = torch.empty((min(step, draws), size), dtype=torch.float32, device=like.device) if passing else None
        for low in range(0, draws, step):
            count = min(step, draws - low)
            own = None if space is None else space[:count]
            yield self.precision.draws(count, key.fold(low) if low else key, like, own)

    def sample(self, draws: int, key: Key) -> Tensor:
        self._alone()
        return torch.cat([self._moved(deviations) for deviations in self._some(draws, key, self.mean)])

    def log_density(self, theta: Tensor) -> Tensor:
        """-(w - mean)^T precision (w - mean) / 2 + logdet / 2 - R/2 log 2 pi."""
        self._alone()
        away = theta.to(torch.float64) - self.mean.to(torch.float64)  # (S, P)
        if self.joint.random_indices is not None:
            away = away[..., self.joint.random_indices]
        quadratic = (away * self.precision.matvec(away)).sum(-1)
        return 0.5 * (self.precision.logdet - self.precision.size * math.log(2.0 * math.pi) - quadratic)

    @property
    def entropy(self) -> Tensor:
        """R/2 log(2 pi e) - logdet / 2, in nats."""
        return 0.5 * (self.precision.size * math.log(2.0 * math.pi * math.e) - self.precision.logdet)

    def _moved(self, deviations: Tensor) -> Tensor:
        """Weights (s, P) from deviations (s, R), which may be written over."""
        index = self.joint.random_indices
        if index is None:
            return deviations.add_(self.mean)
        return self.mean.expand(len(deviations), -1).clone().index_add_(1, index, deviations)

    def outputs(self, inputs: Inputs, draws: int, key: Key) -> Tensor:
        """One forward pass for each draw; on a GPU, which a small pass leaves idle, several draws as members of one."""
        self._alone()
        assert isinstance(self.joint, Joint)
        joint, buffers = self.joint, self.buffers or None
        some = self._some(draws, key, self.mean, passing=not torch.is_grad_enabled())  # a graph keeps the weights
        numbers = sum(value.numel() for value in named_tensors(inputs).values())
        rows = AT_ONCE.get(joint.device.type, 1) // max(1, num_rows(inputs))
        together = max(1, min(rows, NUMBERS_AT_ONCE // max(1, numbers)))
        parts: list[Tensor] = []
        for deviations in some:
            weights = self._moved(deviations)
            if together == 1:
                parts.append(torch.stack([joint.outputs(theta, inputs, buffers) for theta in weights]))
            else:
                some_outputs = (joint.outputs(members, inputs, buffers) for members in torch.split(weights, together))
                parts += [outputs.clone() for outputs in some_outputs]  # they may be the weights, which are passing
        return torch.cat(parts)


def gaussian(joint: Joint, module: nn.Module, precisions: Mapping[Tensor, Tensor]) -> Gaussian:
    """N(module's weights, 1 / precisions) over the random weights of the joint, by their names in the module.

    `precisions` has a tensor for each parameter of the optimiser. Buffers are the module's.
    """
    named = dict(module.named_parameters())
    layout = joint.network.layout
    for part in layout:
        if part.name not in named or named[part.name].shape != part.shape:
            raise ValueError(
                "IVON.posterior: the module must be that of the joint. "
                f"It has no parameter '{part.name}' of shape {tuple(part.shape)}."
            )
    missing = [part.name for part in joint.random_slices if named[part.name] not in precisions]
    if missing:
        raise ValueError(
            f"IVON.posterior: the optimiser has no parameter '{missing[0]}', which is random in the joint. "
            "Pass the optimiser all of them, or name its own in Joint(..., random=...)."
        )
    mean = layout.flatten({part.name: named[part.name].detach() for part in layout})
    point = mean.new_ones((), dtype=torch.float64)  # stands for weights that are not random, and is left out
    every = [precisions.get(named[part.name], point.expand(part.shape)).reshape(-1) for part in layout]
    places = joint.random_indices
    precision = torch.cat(every) if places is None else torch.cat(every)[places]
    buffers = dict(module.named_buffers())
    kept = {name: buffers[name].detach().clone() for name in joint.network.buffers}
    return Gaussian(joint, mean.clone(), Diagonal(precision), kept)
