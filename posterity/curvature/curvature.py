"""The interface of curvatures of the negative log-likelihood, and their sums over a batch."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache, cached_property, partial
from math import prod
from typing import ClassVar

import torch
from torch import Tensor

from posterity.curvature.derivatives import Piece, derivatives
from posterity.curvature.explicit import derivatives_of_gradients, torch_kernels
from posterity.curvature.survey import Place, Survey, survey
from posterity.jacobians.jacobian import Stacked
from posterity.jacobians.linear import Thin
from posterity.jacobians.output_layer import OutputLayer
from posterity.likelihoods.likelihood import Likelihood
from posterity.model.batch import Inputs, map_inputs, num_rows
from posterity.model.data import Batch
from posterity.model.density import Density
from posterity.model.joint import Joint
from posterity.model.network import Buffers
from posterity.model.problem import Problem
from posterity.model.weights import entry_weights, output_weights, row_weights, weighted_log_prob
from posterity.numerics.autodiff import chunk_rows, dense_hessian
from posterity.numerics.random import Key

logger = logging.getLogger("posterity")

GRAPHS = 8  # copies of a row's activations in the graph of a derivative of a gradient
SURPLUS = 10  # drawn columns of all rows for each weight of a matrix that is kept whole
FIRST_ORDER = "Use the curvature GaussNewton()."
WIDE = 64  # outputs from which closed forms of the output layer are faster than columns


class Curvature(ABC):
    """A symmetric approximation of the Hessian of -log p(D | theta) in the random weights.

    It is a sum over the rows of a batch: untempered, unscaled, without the prior. Most have the form
    sum_n J_n^T S_n S_n^T J_n with columns S_n in output space; a `Structure` decides how much of the matrix is kept.
    """

    factored: ClassVar[bool] = True
    """Whether it has columns."""

    scales_with_noise: ClassVar[bool] = True
    """Whether, under Gaussian noise, it is proportional to the inverse square of the noise scale."""

    @abstractmethod
    def columns(self, likelihood: Likelihood, outputs: Tensor, targets: Tensor, key: Key) -> Tensor:
        """The columns S of each row, (K, n, *event), at outputs (n, *event)."""

    def num_columns(self, outputs: int) -> int:
        """The largest number K of columns per row, for this many outputs."""
        return outputs

    def columns_for(self, outputs: int, whole: int, num_data: int) -> int:
        """Columns of each of `num_data` rows with this many outputs, where matrices of up to `whole` weights are kept.

        Of drawn ones, all rows together have `SURPLUS` times that many: the inverse of a matrix made of m random
        columns is too large by m / (m - whole).
        """
        count = self.num_columns(outputs)
        return max(count, min(outputs, -(-SURPLUS * whole // num_data))) if self.draws(outputs) else count

    def draws(self, outputs: int) -> bool:
        """Whether columns are drawn in place of exact ones, for this many outputs."""
        return False

    def drawn(self, likelihood: Likelihood, outputs: Tensor, targets: Tensor, key: Key, count: int) -> Tensor:
        """This many drawn columns, where `draws`; all exact ones, where they are no more."""
        return self.columns(likelihood, outputs, targets, key)

    def probabilities(self, likelihood: Likelihood, outputs: Tensor) -> Tensor | None:
        """p, shaped as outputs (n, C, *positions), where S S^T is diag(p) - p p^T at each position; else None."""
        return None

    def in_closed_form(self, likelihood: Likelihood, known: Survey) -> bool:
        """Whether an output layer is taken in closed form: it has many outputs, or several positions."""
        wide = len(known.event) > 1 or prod(known.event) > WIDE
        if known.output is None or known.select is not None or not wide:
            return False
        return self.probabilities(likelihood, torch.zeros(1, *known.event)) is not None

    def matrix(
        self, joint: Problem, theta: Tensor, batch: Batch | None, buffers: Buffers | None, seed: int = 0
    ) -> Tensor:
        """The dense matrix (R, R) in float64 at theta (P,)."""
        return Rows(self, joint, theta, batch, buffers, Key(seed)).matrix()

    def diagonal(
        self, joint: Problem, theta: Tensor, batch: Batch | None, buffers: Buffers | None, seed: int = 0
    ) -> Tensor:
        """The diagonal (R,) in float64 at theta (P,)."""
        return Rows(self, joint, theta, batch, buffers, Key(seed)).diagonal()


def score(likelihood: Likelihood, outputs: Tensor, targets: Tensor) -> Tensor:
    """d log p(y | f) / d f for each row, (n, *event)."""
    leaf = outputs.detach().requires_grad_()
    with torch.enable_grad():
        value = likelihood.log_prob(leaf, targets).sum()
    (grad,) = torch.autograd.grad(value, leaf)
    return grad


WHOLE_SLOPE = 20_000  # up to this many weights, the gradient is taken in all of them, by another backward pass


class Rows:
    """A curvature at theta (P,), summed over the rows of a batch; everything is computed on demand.

    `offset` rows of the same batch come before these: they draw other columns. Set `sloped` before `jacobians` where
    `slope` is wanted, too: it then comes from the same forward pass, if the network is large.
    """

    def __init__(
        self,
        curvature: Curvature,
        joint: Problem,
        theta: Tensor,
        batch: Batch | None,
        buffers: Buffers | None,
        key: Key,
        budget: int | None = None,
        offset: int = 0,
    ) -> None:
        if batch is not None and not batch.checked and not batch.targets.is_floating_point():
            batch = joint.as_joint("curvature").check(batch)
        self.curvature, self.joint, self.theta, self.batch = curvature, joint, theta, batch
        self.buffers, self.key, self.budget, self.offset = buffers, key, budget, offset
        self.sloped = False
        self._outputs: list[Tensor] = []
        self._head_slope: Tensor | None = None
        self._slope: Tensor | None = None

    def part(self, low: int, high: int) -> "Rows":
        """The same for the rows low .. high - 1 of the batch alone."""
        batch = None if self.batch is None else self.batch.rows(low, high)
        given = self.curvature, self.joint, self.theta, batch, self.buffers, self.key, self.budget
        rows = Rows(*given, offset=self.offset + low)
        rows.sloped = self.sloped
        return rows

    @property
    def factored(self) -> bool:
        """Whether the curvature has `jacobians`."""
        return self.curvature.factored

    @cached_property
    def weights(self) -> Tensor | None:
        """Weights of the rows (n,), the means of their entries'; None where all are 1."""
        return None if self.batch is None else row_weights(self.data[0].likelihood, self.batch, self.theta.dtype)

    @cached_property
    def entry_weights(self) -> Tensor | None:
        """Weights (n,) of the rows or (n, *entries) of their entries, 0 for missing targets; None where all are 1."""
        return None if self.batch is None else entry_weights(self.data[0].likelihood, self.batch, self.theta.dtype)

    @property
    def size(self) -> int:
        """R."""
        return self.joint.num_random

    @property
    def data(self) -> tuple[Joint, Batch]:
        """The joint and the batch, which a `Density` does not have."""
        assert isinstance(self.joint, Joint)
        assert self.batch is not None
        return self.joint, self.batch

    @property
    def places(self) -> tuple[Place, ...]:
        """Blocks of the random weights, by layer."""
        joint, batch = self.data
        return survey(joint, batch.inputs).places

    def jacobians(self, *, between_layers: bool = False, whole: int = 0) -> Iterator[Piece]:
        """Yield the factors J_n^T S_n, whose products sum to the curvature.

        An output layer with many outputs is in closed form (`OutputLayer`), apart from the columns of the others. With
        `between_layers` all layers share their columns, unless there is no other. `whole` is the size of the largest
        matrix that is kept of these, see `num_columns`.
        """
        if not isinstance(self.joint, Joint):
            raise TypeError(
                f"A Density has no network outputs, so no {type(self.curvature).__name__} matrix. "
                "Use the curvature Hessian()."
            )
        joint, batch = self.data
        self._outputs, self._head_slope, self._slope = [], None, None
        known = survey(joint, batch.inputs)
        outputs, point = max(1, prod(known.event)), (self.theta, batch.inputs, self.buffers)
        closed = self.curvature.in_closed_form(self.likelihood, known) and (known.only_output or not between_layers)
        if self.curvature.draws(outputs) and not (closed and known.only_output):
            layers = "all layers but the output layer" if closed else "all layers"
            _say_drawn(outputs, self.num_columns(outputs, whole), layers)
        count, probabilities = self.num_columns(outputs, whole), self._probabilities if closed else None
        columns = partial(self._columns, count=count)
        by_rules = known.head is None and known.select is None and not known.explicit and not closed
        slope = self._score if self.sloped and by_rules and self.size > WHOLE_SLOPE else None
        given = {"probabilities": probabilities, "count": count, "budget": self.budget, "slope": slope}
        for piece in derivatives(joint, *point, columns, **given):  # type: ignore[arg-type]
            if piece.slope is not None:
                self._slope = piece.slope.double() if self._slope is None else self._slope + piece.slope
            if piece.fresh:
                self._outputs.append(piece.outputs)
                if known.head is not None and isinstance(piece.jacobian, Stacked):
                    # The gradient in the weights of the output layer needs no further pass.
                    part = piece.jacobian.part(known.head)
                    assert isinstance(part, (Thin, OutputLayer))
                    own = self._score(piece.outputs, piece.low)
                    own = (own.T.to(part.inputs.dtype) @ part.inputs).flatten().to(torch.float64)
                    self._head_slope = own if self._head_slope is None else self._head_slope + own
            yield piece
            del piece  # its memory serves the next

    def slope(self) -> Tensor:
        """Gradient of the log-likelihood (R,) in float64.

        After `jacobians` of a large network that ends in a linear layer: in that layer alone, by its block,
        since another pass would cost as much as the Jacobians.
        """
        if self._slope is not None:
            return self._slope
        head = self._head_slope
        if head is not None and (self.size > WHOLE_SLOPE or head.numel() == self.size):
            return head
        if not isinstance(self.joint, Joint):
            return self.theta.new_zeros(0, dtype=torch.float64)
        negative, random = self._negative()
        leaf = random.requires_grad_()
        with torch.enable_grad():
            (grad,) = torch.autograd.grad(-negative(leaf), leaf)
        return grad.to(torch.float64)

    def outputs(self) -> Tensor:
        """Outputs at the rows (n, *event), kept from `jacobians` if it was called."""
        if not self._outputs:
            joint, batch = self.data
            with torch.no_grad():
                self._outputs = [joint.outputs(self.theta, batch.inputs, self.buffers)]
        return self._outputs[0] if len(self._outputs) == 1 else torch.cat(self._outputs)

    def _probabilities(self, outputs: Tensor, low: int) -> tuple[Tensor, Tensor | None]:
        """Probabilities and weights of the rows from `low` on, for `derivatives`."""
        probabilities = self.curvature.probabilities(self.likelihood, outputs)
        assert probabilities is not None
        return probabilities, None if self.entry_weights is None else self.entry_weights[low : low + len(outputs)]

    def num_columns(self, outputs: int, whole: int) -> int:
        """Columns of a row: see `Curvature.columns_for`."""
        return self.curvature.columns_for(outputs, whole, self.joint.as_joint("curvature").num_data)

    def _columns(self, outputs: Tensor, low: int, count: int) -> Tensor:
        targets = self.data[1].targets[low : low + len(outputs)]
        given = self.likelihood, outputs, targets, self.key.fold(self.offset + low)
        draws = self.curvature.draws(max(1, outputs[:1].numel()))
        columns = (self.curvature.drawn(*given, count) if draws else self.curvature.columns(*given)).detach()
        weights = self._output_weights(outputs, slice(low, low + len(outputs)))
        return columns if weights is None else columns * weights.sqrt()

    def _score(self, outputs: Tensor, low: int) -> Tensor:
        """Derivatives of the weighted log-likelihood in the outputs (n, *event) of the rows from `low` on."""
        rows = slice(low, low + len(outputs))
        slope, weights = (
            score(self.likelihood, outputs, self.data[1].targets[rows]),
            self._output_weights(outputs, rows),
        )
        return slope if weights is None else slope * weights

    def _output_weights(self, outputs: Tensor, rows: slice) -> Tensor | None:
        """Weights that broadcast to the outputs (n, *event) of some of the rows; None where all are 1."""
        if self.entry_weights is None:
            return None
        return output_weights(self.likelihood, self.entry_weights[rows], outputs).to(outputs.dtype)

    @property
    def likelihood(self) -> Likelihood:
        """The joint's likelihood with the learnt parameters at the end of theta (P,)."""
        joint = self.data[0]
        return joint.likelihood.with_free(joint.split(self.theta)[1]) if joint.likelihood.num_free else joint.likelihood

    def log_likelihood(self) -> Tensor:
        """Sum over the rows of w_n log p(y_n | f_n), in float64, at `outputs`."""
        if isinstance(self.joint, Density):
            return self.joint.log_density(self.theta).detach().to(torch.float64)
        with torch.no_grad():
            batch = self.data[1]
            weights = None if batch.weights is None else batch.weights.double()
            return weighted_log_prob(self.likelihood, self.outputs(), batch.targets, weights).double().sum()

    def matrix(self) -> Tensor:
        """The dense matrix (R, R), in float64."""
        if not self.factored:
            negative, random = self._negative()
            kernels = nullcontext() if self.joint.network is None else torch_kernels(self.joint.network)
            with kernels, derivatives_of_gradients(FIRST_ORDER):
                return dense_hessian(negative, random).to(torch.float64)
        total: Tensor | None = None
        for piece in self.jacobians(between_layers=True, whole=self.size):
            total = piece.jacobian.gram(total)
        assert total is not None
        return 0.5 * (total + total.mT)  # a product is symmetric up to rounding

    def diagonal(self) -> Tensor:
        """The diagonal (R,), in float64; without columns it comes from the whole matrix."""
        return (self.squares() if self.factored else self.matrix().diagonal()).to(torch.float64)

    def squares(self, out: Tensor | None = None) -> Tensor:
        """The diagonal (R,) of a curvature with columns, in the dtype of the weights, added to `out`."""
        total = torch.zeros(self.size, dtype=self.theta.dtype, device=self.theta.device) if out is None else out
        for piece in self.jacobians():
            if isinstance(piece.jacobian, Stacked):
                piece.jacobian.accumulate_squares(total)
            else:
                total.add_(piece.jacobian.squares())
            del piece
        return total

    def _negative(self) -> tuple[Callable[[Tensor], Tensor], Tensor]:
        """(-log-likelihood of the rows as a function of the random weights, their values)."""
        density = self.joint
        if isinstance(density, Density):
            return (lambda theta: -density.log_density(theta)), self.theta.detach()
        joint, batch = self.data
        rebuild, random = weights_function(joint, self.theta)
        likelihood = self.likelihood

        def negative(weights: Tensor) -> Tensor:
            outputs = joint.network.outputs(rebuild(weights), batch.inputs, self.buffers)
            return -weighted_log_prob(likelihood, outputs, batch.targets, batch.weights).sum()

        return negative, random

    def products(self, vectors: Tensor) -> Tensor:
        """Products of the curvature with vectors (m, R), in float64, without forming it."""
        if self.joint.network is None:
            return vectors.to(torch.float64) @ self.matrix()
        remedy = "Use the structure Full(), Kronecker() or Diagonal()." if self.factored else FIRST_ORDER
        with torch_kernels(self.joint.network), torch.enable_grad(), derivatives_of_gradients(remedy):
            multiply = self._factored_products if self.factored else self._hessian_products
            return multiply(vectors.to(self.theta.dtype)).to(torch.float64)

    def _hessian_products(self, vectors: Tensor) -> Tensor:
        negative, random = self._negative()
        leaf = random.requires_grad_()
        (grad,) = torch.autograd.grad(negative(leaf), leaf, create_graph=True)
        return torch.stack([torch.autograd.grad(grad, leaf, vector, retain_graph=True)[0] for vector in vectors])

    def _factored_products(self, vectors: Tensor) -> Tensor:
        """J^T S S^T J v, where J v is the derivative in u of v . (J^T u), which is linear in u."""
        joint, batch = self.data
        rebuild, random = weights_function(joint, self.theta)
        leaf = random.requires_grad_()
        outputs = joint.network.outputs(rebuild(leaf), batch.inputs, self.buffers)
        self._outputs = [outputs.detach()]
        multiply = self._fisher_product(outputs.detach())
        dummy = torch.zeros_like(outputs, requires_grad=True)
        (pulled,) = torch.autograd.grad(outputs, leaf, dummy, create_graph=True)
        results = []
        for vector in vectors:
            (pushed,) = torch.autograd.grad(pulled, dummy, vector, retain_graph=True)  # J v
            results.append(torch.autograd.grad(outputs, leaf, multiply(pushed), retain_graph=True)[0])
        return torch.stack(results)

    def _fisher_product(self, outputs: Tensor) -> Callable[[Tensor], Tensor]:
        """The function v -> S S^T v of vectors shaped as the outputs; exact, where columns would be drawn."""
        size = max(1, outputs[:1].numel())
        if not self.curvature.draws(size):
            columns = self._columns(outputs, 0, self.curvature.num_columns(size)).reshape(
                -1, len(outputs), size
            )  # (K, n, D)

            def by_columns(vector: Tensor) -> Tensor:
                inner = torch.einsum("knd,nd->kn", columns, vector.reshape(columns.shape[1:]))
                return torch.einsum("knd,kn->nd", columns, inner).view_as(outputs)

            return by_columns
        weights = self._output_weights(outputs, slice(None))
        weights = outputs.new_ones(()) if weights is None else weights
        fisher = self.likelihood.fisher_by_position(outputs)
        if fisher is not None:
            return lambda vector: fisher.product(vector) * weights
        dense = self.likelihood.output_fisher(outputs, outputs.dim() - 1)  # (n, D, D)
        return lambda vector: (dense @ vector.reshape(-1, size, 1)).view_as(outputs) * weights


@cache
def _say_drawn(outputs: int, columns: int, layers: str) -> None:
    """Log once that columns are drawn."""
    logger.warning(
        f"GaussNewton: with {outputs:,} outputs a row, {layers} take {columns} random columns in place of exact ones "
        "(unbiased). GaussNewton(column_limit=None) takes all of them, with a backward pass for each."
    )


def directional_derivatives(
    joint: Joint, theta: Tensor, inputs: Inputs, buffers: Buffers | None, vectors: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield outputs (n, *event) of successive rows, and J v (S, n, *event) for vectors v (S, R), without J.

    J v is the derivative in u of v . (J^T u), which is linear in u: some two backward passes for each vector, however
    many outputs there are.
    """
    rebuild, random = weights_function(joint, theta)
    known = survey(joint, inputs)
    step = chunk_rows(joint.dtype.itemsize * (GRAPHS * known.row_entries + 2 * len(vectors) * prod(known.event)))
    for low in range(0, num_rows(inputs), step):
        part = map_inputs(lambda tensor, low=low: tensor[low : low + step], inputs)  # type: ignore[misc]
        remedy = "Predict by draws of the weights: q.gaussian.predict(x)."
        with torch_kernels(joint.network), torch.enable_grad(), derivatives_of_gradients(remedy):
            leaf = random.detach().requires_grad_()
            outputs = joint.network.outputs(rebuild(leaf), part, buffers)
            dummy = torch.zeros_like(outputs, requires_grad=True)
            (pulled,) = torch.autograd.grad(outputs, leaf, dummy, create_graph=True)
            pushed = [torch.autograd.grad(pulled, dummy, vector, retain_graph=True)[0] for vector in vectors]
        yield outputs.detach(), torch.stack(pushed)


def weights_function(joint: Joint, theta: Tensor) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """(rebuild, random): `rebuild(random)` is the weight vector with the random weights replaced."""
    index = joint.random_indices
    weights = theta[: joint.num_weights].detach()
    if index is None:
        return (lambda random: random), weights.clone()
    return (lambda random: weights.index_copy(0, index, random)), weights[index]
