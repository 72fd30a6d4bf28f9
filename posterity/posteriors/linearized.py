"""A Gaussian over weights seen through the network's linearisation at the mean."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from posterity.curvature.derivatives import Piece, derivatives, row_bytes
from posterity.curvature.survey import survey
from posterity.jacobians.jacobian import Jacobian
from posterity.model.batch import Inputs, num_rows
from posterity.model.joint import Joint
from posterity.model.network import Buffers
from posterity.model.problem import Problem
from posterity.numerics.random import Key
from posterity.posteriors.gaussian import Gaussian
from posterity.posteriors.posterior import Posterior
from posterity.precisions.dense import Dense
from posterity.precisions.low_rank import LowRank

JOINT_BUDGET = 1 << 32  # bytes up to which all rows are taken together where the caller sets no other bound


@dataclass(frozen=True, eq=False)
class Linearized(Posterior):
    """The functions f(x, m) + J(x) (w - m), w ~ N(m, Sigma): Gaussian outputs in closed form.

    **Math**: f(x) ~ N(f(x, m), J(x) Sigma J(x)^T) with J(x) = d f(x, w) / d w at m.

    **Limit**: exact when f is linear in w. It is the model whose Hessian the Gauss-Newton matrix is, which is why
    its predictions go well with that curvature.

    **Predictions**: `predict(x)` integrates the likelihood over that Gaussian in closed form or by quadrature (the
    `integrator`), `predict(x, integrator=MonteCarlo(draws))` over draws of each row's outputs by themselves.
    `outputs(x, draws, key)` draws linear functions, which tie the rows together: `from_outputs(likelihood, ...)` of it
    has a joint density. `gaussian.predict(x, draws=...)` samples weights and runs the network itself at each, with no
    linearisation: for a Laplace posterior it often underfits. `joint_output_moments(x)` is the Gaussian over all rows.

    **Cost**: D backward passes for each row, in factors: (N, D, R) is never formed but for the structures `Full` and
    `LowRank`, some rows at a time; then about as much again as the passes took. Last layers need a forward pass only.
    Where the integrator asks for variances alone nothing is (D, D). All is differentiable in x.

    **References**: Bishop (2006), section 5.7; Immer et al. (2021), Improving predictions of Bayesian neural nets.

    **Example**:

    >>> from posterity.likelihoods import Gaussian as Noise
    >>> from posterity.precisions import Dense
    >>> from posterity.priors import Normal
    >>> joint = Joint(torch.nn.Linear(1, 1, bias=False), Noise(scale=1.0), Normal(), num_data=1)
    >>> q = Linearized(joint, Gaussian(joint, torch.zeros(1), Dense(torch.tensor([[4.0]]))))
    >>> q.predict(torch.tensor([[2.0]])).epistemic  # 2^2 / 4
    tensor([[1.]])
    """

    joint: Problem
    gaussian: Gaussian

    @property
    def num_members(self) -> int | None:
        return self.gaussian.num_members

    def member(self, index: int) -> "Linearized":
        one = self.gaussian.member(index)
        return Linearized(one.joint, one)

    @property
    def buffers(self) -> Buffers:  # type: ignore[override]  # never written: the class is frozen
        return self.gaussian.buffers

    @property
    def log_evidence(self) -> Tensor | None:
        """Log evidence of the model, where the method computed it."""
        return self.gaussian.log_evidence

    def point(self) -> Tensor:
        return self.gaussian.mean

    def sample(self, draws: int, key: Key) -> Tensor:
        return self.gaussian.sample(draws, key)

    def log_density(self, theta: Tensor) -> Tensor:
        return self.gaussian.log_density(theta)

    def outputs(self, inputs: Inputs, draws: int, key: Key) -> Tensor:
        """Linear functions of shared weight draws, so that rows are correlated as they should be."""
        deviations = self.gaussian.deviations(draws, key, self.gaussian.mean.dtype)  # (S, R)
        parts = [
            outputs + shift.reshape(draws, *outputs.shape)
            for outputs, shift in _by_rows(self._pieces(inputs), lambda jacobian: jacobian.products(deviations))
        ]
        return torch.cat(parts, dim=1)

    def output_moments(
        self, inputs: Inputs, *, marginal: bool = False, memory_budget: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Mean f(x, m) and covariance J Sigma J^T, or its diagonals."""
        precision = self.gaussian.precision
        pieces = self._pieces(inputs, memory_budget, whole=not marginal)
        found = list(_by_rows(pieces, precision.marginal if marginal else precision.quadratic))
        means, spreads = zip(*found, strict=True)
        return torch.cat(means), torch.cat(spreads).to(means[0].dtype)

    def joint_output_moments(self, inputs: Inputs, *, memory_budget: int | None = None) -> tuple[Tensor, Tensor]:
        """Mean f(x, m) and covariance J Sigma J^T between all rows, whose derivatives are held together."""
        assert isinstance(self.joint, Joint)
        needed = self._joint_bytes(self.joint, inputs)
        limit = JOINT_BUDGET if memory_budget is None else memory_budget
        if needed > limit:
            raise ValueError(
                f"The covariance between {num_rows(inputs)} rows takes about {needed:,} bytes, and {limit:,} are to be "
                "used. Pass fewer rows or a larger memory_budget, or draw functions: outputs(inputs, draws, key)."
            )
        (piece,) = self._pieces(inputs, sys.maxsize, whole=True)
        return piece.outputs, self.gaussian.precision.joint_quadratic(piece.jacobian).to(piece.outputs.dtype)

    def _joint_bytes(self, joint: Joint, inputs: Inputs) -> int:
        """What the factors of the derivatives of all rows and a few matrices of the covariance's size take."""
        known, count = survey(joint, inputs), num_rows(inputs)
        columns = max(1, prod(known.event))
        factors = count * row_bytes(joint, known, units=True) * (2 + (0 if known.only_head else columns))
        dense = isinstance(self.gaussian.precision, (Dense, LowRank))
        return factors + 8 * count * columns * (3 * count * columns + (2 * known.size if dense else 0))

    def _pieces(self, inputs: Inputs, budget: int | None = None, whole: bool = False) -> Iterator[Piece]:
        self._alone()
        assert isinstance(self.joint, Joint)
        gaussian = self.gaussian
        return derivatives(self.joint, gaussian.mean, inputs, gaussian.buffers or None, budget=budget, whole=whole)


def _by_rows(pieces: Iterator[Piece], function: Callable[[Jacobian], Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Outputs (n, *event) of some rows after the other, and the function (..., n, D) of all columns of these rows."""
    outputs: Tensor | None = None
    values: list[Tensor] = []
    for piece in pieces:
        if piece.fresh and outputs is not None:
            yield outputs, torch.cat(values, -1)
            values = []
        outputs = piece.outputs
        values.append(function(piece.jacobian))
    if outputs is not None:
        yield outputs, torch.cat(values, -1)
