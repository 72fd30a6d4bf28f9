"""A Gaussian over weights seen through the network's linearisation at the mean."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from posterity.curvature.derivatives import Piece, derivatives
from posterity.model.density import Density
from posterity.model.inputs import Inputs
from posterity.model.joint import Joint
from posterity.model.network import Buffers
from posterity.numerics.random import Key
from posterity.posteriors.gaussian import Gaussian
from posterity.posteriors.posterior import Posterior


@dataclass(frozen=True, eq=False)
class Linearized(Posterior):
    """The functions f(x, m) + J(x) (w - m), w ~ N(m, Sigma): Gaussian outputs in closed form.

    **Math**: f(x) ~ N(f(x, m), J(x) Sigma J(x)^T) with J(x) = d f(x, w) / d w at m.

    **Limit**: exact when f is linear in w. It is the model whose Hessian the Gauss-Newton matrix is, which is why
    its predictions go well with that curvature.

    **Cost**: one Jacobian (C backward passes) for each row, and a triangular solve with each.

    **References**: Bishop (2006), section 5.7; Immer et al. (2021), Improving predictions of Bayesian neural nets.

    **Example**:

    >>> from posterity.likelihoods import Gaussian as Noise
    >>> from posterity.numerics import Dense
    >>> from posterity.priors import Normal
    >>> joint = Joint(torch.nn.Linear(1, 1, bias=False), Noise(scale=1.0), Normal(), num_data=1)
    >>> q = Linearized(joint, Gaussian(joint, torch.zeros(1), Dense(torch.tensor([[4.0]]))))
    >>> q.predict(torch.tensor([[2.0]])).epistemic  # 2^2 / 4
    tensor([[1.]])
    """

    joint: Joint | Density
    gaussian: Gaussian

    @property
    def num_members(self) -> int | None:
        """As of the Gaussian."""
        return self.gaussian.num_members

    def member(self, index: int) -> "Linearized":
        """The posterior of one member."""
        one = self.gaussian.member(index)
        return Linearized(one.joint, one)

    @property
    def buffers(self) -> Buffers:  # type: ignore[override]  # never written: the class is frozen
        """Those of the Gaussian."""
        return self.gaussian.buffers

    @property
    def log_evidence(self) -> Tensor | None:
        """Log evidence of the model, where the method computed it."""
        return self.gaussian.log_evidence

    def point(self) -> Tensor:
        """The mean."""
        return self.gaussian.mean

    def sample(self, draws: int, key: Key) -> Tensor:
        """Weights of the Gaussian."""
        return self.gaussian.sample(draws, key)

    def outputs(self, inputs: Inputs, draws: int, key: Key) -> Tensor:
        """Linear functions of shared weight draws, so that rows are correlated as they should be."""
        deviations = self.gaussian.deviations(draws, key)  # (S, R)
        parts = []
        for piece in self._pieces(inputs):
            shift = torch.cat(
                [
                    torch.einsum("ndr,sr->snd", part.rows().to(torch.float64), deviations)
                    for _, part in piece.jacobian.chunks()
                ],
                1,
            )  # (S, n, D)
            parts.append(piece.outputs + shift.reshape(draws, *piece.outputs.shape).to(piece.outputs.dtype))
        return torch.cat(parts, dim=1)

    def output_moments(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Mean f(x, m) and covariance J Sigma J^T."""
        means, covariances = [], []
        for piece in self._pieces(inputs):
            means.append(piece.outputs)
            covariances.append(self.gaussian.precision.quadratic(piece.jacobian).to(piece.outputs.dtype))
        return torch.cat(means), torch.cat(covariances)

    def _pieces(self, inputs: Inputs) -> Iterator[Piece]:
        self._alone()
        assert isinstance(self.joint, Joint)
        return derivatives(self.joint, self.gaussian.mean, inputs, self.gaussian.buffers or None)
