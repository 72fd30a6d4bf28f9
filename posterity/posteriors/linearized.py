"""Gaussian weights with the network linearised at their mean."""

import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from math import prod

import torch
from torch import Tensor, nn

from posterity.curvature.curvature import directional_derivatives
from posterity.curvature.derivatives import Piece, derivatives, row_bytes
from posterity.curvature.survey import survey
from posterity.jacobians.jacobian import Jacobian
from posterity.model.batch import Inputs, named_tensors, num_rows
from posterity.model.joint import Joint
from posterity.model.problem import Problem
from posterity.numerics.random import Key
from posterity.posteriors.functions import Evaluation
from posterity.posteriors.gaussian import LARGE, Gaussian, OfGaussian
from posterity.posteriors.linear_chains import ChainMoments, differentiable_chain
from posterity.posteriors.standalone import LastLayer, last_layer_of, module_at
from posterity.precisions.dense import Dense
from posterity.precisions.low_rank import LowRank

JOINT_BUDGET = 1 << 32  # bytes of a joint covariance of all rows, by default
MOST_OUTPUTS = 2048  # of a row, up to which a prediction takes a backward pass for each
VARIANCE_DRAWS = 100  # that estimate the variances of more

logger = logging.getLogger("posterity")


@dataclass(frozen=True, eq=False, repr=False)
class Linearized(OfGaussian):
    """The linearised network f(x, m) + J(x) (w - m), w ~ N(m, Sigma): Gaussian outputs in closed form.

    **Math**: f(x) ~ N(f(x, m), J(x) Sigma J(x)^T) with J(x) = d f(x, w) / d w at m.

    **Limit**: exact when f is linear in w. The Gauss-Newton matrix is the Hessian of this model, so its predictions
    suit that curvature.

    **Predictions**: `predict(x)` integrates the likelihood over that Gaussian in closed form or by quadrature (the
    `integrator`), `predict(x, integrator=MonteCarlo(draws))` by independent draws of each row's outputs.
    `outputs(x, draws, key)` draws linear functions, which all rows share: `from_outputs(likelihood, ...)` of it has a
    joint density. `gaussian.predict(x, draws=...)` samples weights of the network itself, without linearisation: for a
    Laplace posterior it often underfits. `joint_output_moments(x)` is the Gaussian over all rows.

    **Cost**: D backward passes for each row, in factors: (N, D, R) is formed only for the structures `Full` and
    `LowRank`, some rows at a time; then about as much again as the passes took. Last layers need a forward pass only.
    Where the integrator needs variances only, nothing is (D, D). All is differentiable in x. With more than 2,048
    outputs a row (pixels, tokens) in layers before the last, `predict` takes these variances from 100 draws of linear
    functions, with a relative standard error of 0.14; `output_moments` is exact, and `predict` of inputs that require
    a gradient.

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
    def by_draws(self) -> bool:
        return False

    def outputs(self, inputs: Inputs, draws: int, key: Key) -> Tensor:
        """Outputs of linear functions with weight draws that all rows share, (S, N, *event)."""
        assert isinstance(self.joint, Joint)
        if survey(self.joint, inputs).only_output:  # features are small beside the draws of the weights
            self._alone()
            pieces = list(self._pieces(inputs))
            blocks = [
                torch.cat(
                    [piece.outputs + _shaped(piece.jacobian.products(some), piece.outputs) for piece in pieces], 1
                )
                for some in self.gaussian._blocks(draws, key, self.gaussian.mean)
            ]
            return torch.cat(blocks)
        return self._outputs_at(self.gaussian.deviations(draws, key, self.gaussian.mean.dtype), inputs)

    def drawn_functions(self, draws: int, key: Key) -> Evaluation:
        """Linear functions, with the weights that `outputs` draws under the key."""
        deviations = self.gaussian.deviations(draws, key, self.gaussian.mean.dtype)
        return lambda inputs, numbers: self._outputs_at(deviations[numbers.to(deviations.device)], inputs)

    def _outputs_at(self, deviations: Tensor, inputs: Inputs) -> Tensor:
        """Outputs (s, N, *event) of the linear functions with deviations (s, R)."""
        parts = [
            outputs + shift.reshape(len(deviations), *outputs.shape)
            for outputs, shift in _by_rows(self._pieces(inputs), lambda jacobian: jacobian.products(deviations))
        ]
        return torch.cat(parts, dim=1)

    def standalone(self, draws: int | None, share: float, key: Key) -> nn.Module:
        """The last layer, or a plain chain of linear layers: other derivatives are not traced."""
        joint, gaussian, count = self.joint.as_joint("module"), self.gaussian, self.prediction_draws(draws, share)
        slices = joint.random_slices
        head = last_layer_of(joint.network, [part.name for part in slices])
        chain = differentiable_chain(joint.network)
        inner = head is not None and chain and chain.layers[-1] is not joint.network.module.get_submodule(head)
        if head is None or inner or sum(part.size for part in slices) != joint.num_random:
            if chain is None:
                raise TypeError(
                    "module: a linearised posterior must be over a last linear or convolutional layer, or over a plain "
                    "chain of linear layers and activations (ReLU, Tanh, Sigmoid, GELU, SiLU). Got one over other "
                    "weights, whose derivatives are not traced. Use Laplace(subset=LastLayer()), or q.gaussian.module, "
                    "which draws weights of the network and often underfits."
                )
            deviations = gaussian.deviations(count, key, gaussian.mean.dtype)
            mean = gaussian.mean[: joint.network.layout.size]
            return ChainMoments(
                joint.network, joint.likelihood, mean, gaussian.precision, deviations, joint.random_indices
            )
        theta = gaussian.sample(count, key)
        views = joint.network.layout.unflatten(theta)
        drawn = {part.name.rpartition(".")[2]: views[part.name] for part in slices}
        module = module_at(joint.network, gaussian.mean, gaussian.buffers)
        return LastLayer(joint.likelihood, module, head, drawn, gaussian.precision)

    def row_outputs(self, inputs: Inputs, draws: int, key: Key) -> Iterator[Tensor] | None:
        assert isinstance(self.joint, Joint)
        pieces = list(self._pieces(inputs)) if survey(self.joint, inputs).only_output else []
        none = torch.empty(0, 1, 1)
        if not pieces or self.gaussian.precision.row_draws(pieces[0].jacobian, none.to(pieces[0].outputs)) is None:
            return None
        numbers = sum(piece.outputs.numel() for piece in pieces)
        step = max(1, LARGE["cuda"] // numbers)

        def blocks() -> Iterator[Tensor]:
            for low in range(0, draws, step):
                parts = []
                for piece in pieces:
                    shape, like = (min(step, draws - low), *piece.outputs.shape), piece.outputs
                    noise = key.fold(low).fold(piece.low).normal(shape, torch.float32, like.device).to(like.dtype)
                    away = self.gaussian.precision.row_draws(piece.jacobian, noise)
                    assert away is not None
                    parts.append(like + away.to(like.dtype))
                yield torch.cat(parts, 1)

        return blocks()

    def output_moments(
        self, inputs: Inputs, *, marginal: bool = False, memory_budget: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Mean f(x, m) and covariance J Sigma J^T, or its diagonals."""
        return self._moments(self._pieces(inputs, memory_budget, whole=not marginal), marginal)

    def _moments(self, pieces: Iterable[Piece], marginal: bool = False) -> tuple[Tensor, Tensor]:
        precision = self.gaussian.precision
        chunks = _by_rows(pieces, precision.marginal if marginal else precision.quadratic)
        means, spreads = zip(*chunks, strict=True)
        return torch.cat(means), torch.cat(spreads).to(means[0].dtype)

    def _moments_to_integrate(
        self, inputs: Inputs, marginal: bool, memory_budget: int | None, key: Key
    ) -> tuple[Tensor, Tensor] | None:
        """Moments in closed form; variances by draws where a row has very many outputs below other layers."""
        assert isinstance(self.joint, Joint)
        known, smooth = survey(self.joint, inputs), any(t.requires_grad for t in named_tensors(inputs).values())
        size = max(1, prod(known.event))
        if not marginal or size <= MOST_OUTPUTS or known.only_output or smooth:
            return self.output_moments(inputs, marginal=marginal, memory_budget=memory_budget)
        _say_variances(size)
        deviations = self.gaussian.deviations(VARIANCE_DRAWS, key, self.gaussian.mean.dtype)
        mean = self.gaussian.mean
        pieces = list(directional_derivatives(self.joint, mean, inputs, self.buffers or None, deviations))
        variances = [shifts.square().mean(0).flatten(1) for _, shifts in pieces]
        return torch.cat([outputs for outputs, _ in pieces]), torch.cat(variances)

    def output_moments_under(self, inputs: Inputs) -> Callable[["Linearized"], tuple[Tensor, Tensor]]:
        """Return the function that gives `output_moments(inputs)` of posteriors at the same mean.

        The derivatives are computed once, where they fit the memory budget.
        """
        assert isinstance(self.joint, Joint)
        known, count = survey(self.joint, inputs), num_rows(inputs)
        columns = max(1, prod(known.event))
        if (
            count * row_bytes(self.joint, known, units=True) * (2 + (0 if known.only_output else columns))
            > JOINT_BUDGET
        ):
            return lambda other: other.output_moments(inputs)
        pieces = list(self._pieces(inputs, whole=True))
        return lambda other: other._moments(pieces)

    def joint_output_moments(self, inputs: Inputs, *, memory_budget: int | None = None) -> tuple[Tensor, Tensor]:
        """Mean f(x, m) and covariance J Sigma J^T within and across rows, whose derivatives are held together."""
        assert isinstance(self.joint, Joint)
        # The factors of the derivatives of all rows, and a few matrices of the covariance's size.
        known, count = survey(self.joint, inputs), num_rows(inputs)
        columns = max(1, prod(known.event))
        factors = count * row_bytes(self.joint, known, units=True) * (2 + (0 if known.only_output else columns))
        dense = isinstance(self.gaussian.precision, (Dense, LowRank))
        needed = factors + 8 * count * columns * (3 * count * columns + (2 * known.size if dense else 0))
        limit = JOINT_BUDGET if memory_budget is None else memory_budget
        if needed > limit:
            raise ValueError(
                f"The covariance between {count} rows takes about {needed:,} bytes, and {limit:,} are to be "
                "used. Pass fewer rows or a larger memory_budget, or draw functions: outputs(inputs, draws, key)."
            )
        (piece,) = self._pieces(inputs, sys.maxsize, whole=True)
        return piece.outputs, self.gaussian.precision.joint_quadratic(piece.jacobian).to(piece.outputs.dtype)

    def _pieces(self, inputs: Inputs, budget: int | None = None, whole: bool = False) -> Iterator[Piece]:
        self._alone()
        assert isinstance(self.joint, Joint)
        return derivatives(self.joint, self.gaussian.mean, inputs, self.buffers or None, budget=budget, whole=whole)


@cache
def _say_variances(size: int) -> None:
    """Log once that variances are estimated."""
    logger.warning(
        f"predict: with {size:,} outputs a row, their variances are estimated from {VARIANCE_DRAWS} draws of linear "
        "functions. output_moments(x, marginal=True) is exact, with a backward pass for each output."
    )


def _shaped(shift: Tensor, outputs: Tensor) -> Tensor:
    """Shifts (S, n, D) with the axes of the outputs (n, *event)."""
    return shift.reshape(len(shift), *outputs.shape)


def _by_rows(pieces: Iterable[Piece], function: Callable[[Jacobian], Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield outputs (n, *event) of successive rows, and the function (..., n, D) of all columns of their Jacobian."""
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
