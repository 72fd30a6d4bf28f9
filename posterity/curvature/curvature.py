"""The interface of curvatures of the negative log-likelihood, and their sums over a batch."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from math import prod
from typing import ClassVar

import torch
from torch import Tensor

from posterity.curvature.derivatives import Piece, derivatives
from posterity.curvature.survey import Place, survey, torch_kernels
from posterity.jacobians.jacobian import Stacked
from posterity.jacobians.linear import Thin
from posterity.likelihoods.likelihood import Likelihood
from posterity.model.data import Batch
from posterity.model.density import Density
from posterity.model.joint import Joint
from posterity.model.network import Buffers
from posterity.model.problem import Problem
from posterity.numerics.autodiff import dense_hessian
from posterity.numerics.random import Key


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
    """A curvature at theta (P,), summed over the rows of a batch; everything is computed on demand."""

    def __init__(
        self,
        curvature: Curvature,
        joint: Problem,
        theta: Tensor,
        batch: Batch | None,
        buffers: Buffers | None,
        key: Key,
        budget: int | None = None,
    ) -> None:
        if batch is not None and not batch.checked and not batch.targets.is_floating_point():
            batch = joint.as_joint("curvature").check(batch)
        self.curvature, self.joint, self.theta, self.batch = curvature, joint, theta, batch
        self.buffers, self.key, self.budget = buffers, key, budget
        self._outputs: list[Tensor] = []
        self._head_slope: Tensor | None = None

    @property
    def factored(self) -> bool:
        """Whether the curvature has `jacobians`."""
        return self.curvature.factored

    @property
    def weights(self) -> Tensor | None:
        """Weights of the rows (n,); None where all are 1."""
        return None if self.batch is None else self.batch.weights

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

    def jacobians(self) -> Iterator[Piece]:
        """Yield the factors J_n^T S_n, whose products sum to the curvature."""
        if not isinstance(self.joint, Joint):
            raise TypeError(
                f"A Density has no network outputs, so no {type(self.curvature).__name__} matrix. "
                "Use the curvature Hessian()."
            )
        joint, batch = self.data
        self._outputs, self._head_slope = [], None
        known = survey(joint, batch.inputs)
        count, point = self.curvature.num_columns(max(1, prod(known.event))), (self.theta, batch.inputs, self.buffers)
        for piece in derivatives(joint, *point, self._columns, count=count, budget=self.budget):
            if piece.fresh:
                self._outputs.append(piece.outputs)
                if known.head is not None and isinstance(piece.jacobian, Stacked):
                    # The gradient in the weights of the output layer needs no further pass.
                    part, rows = piece.jacobian.part(known.head), slice(piece.low, piece.low + len(piece.outputs))
                    assert isinstance(part, Thin)
                    slope = score(self.likelihood, piece.outputs, batch.targets[rows])
                    if self.weights is not None:
                        slope = slope * self.weights[rows].unsqueeze(-1).to(slope.dtype)
                    slope = (slope.T @ part.inputs).flatten().to(torch.float64)
                    self._head_slope = slope if self._head_slope is None else self._head_slope + slope
            yield piece

    def slope(self) -> Tensor:
        """Gradient of the log-likelihood (R,) in float64.

        After `jacobians` of a large network that ends in a linear layer: in that layer alone, by its block,
        since another pass would cost as much as the Jacobians.
        """
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
        return torch.cat(self._outputs)

    def _columns(self, outputs: Tensor, low: int) -> Tensor:
        targets = self.data[1].targets[low : low + len(outputs)]
        columns = self.curvature.columns(self.likelihood, outputs, targets, self.key.fold(low)).detach()
        if self.weights is None:
            return columns
        root = self.weights[low : low + len(outputs)].sqrt().to(columns.dtype)
        return columns * root.view(-1, *[1] * (outputs.dim() - 1))

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
            rows = self.likelihood.log_prob(self.outputs(), self.data[1].targets).to(torch.float64)
            return rows.sum() if self.weights is None else (rows * self.weights).sum()

    def matrix(self) -> Tensor:
        """The dense matrix (R, R), in float64."""
        if not self.factored:
            negative, random = self._negative()
            with nullcontext() if self.joint.network is None else torch_kernels(self.joint.network):
                return dense_hessian(negative, random).to(torch.float64)
        total: Tensor | None = None
        for piece in self.jacobians():
            for _, part in piece.jacobian.chunks():
                rows = part.rows().flatten(0, 1).to(torch.float64)
                total = rows.T @ rows if total is None else total.add_(rows.T @ rows)
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
            rows = likelihood.log_prob(outputs, batch.targets)
            return -(rows.sum() if batch.weights is None else (rows * batch.weights).sum())

        return negative, random

    def products(self, vectors: Tensor) -> Tensor:
        """Products of the curvature with vectors (m, R), in float64, without forming it."""
        if self.joint.network is None:
            return vectors.to(torch.float64) @ self.matrix()
        with torch_kernels(self.joint.network), torch.enable_grad():
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
        columns = self._columns(outputs.detach(), 0).reshape(-1, len(outputs), max(1, outputs[:1].numel()))  # (K, n, D)
        dummy = torch.zeros_like(outputs, requires_grad=True)
        (pulled,) = torch.autograd.grad(outputs, leaf, dummy, create_graph=True)
        results = []
        for vector in vectors:
            (pushed,) = torch.autograd.grad(pulled, dummy, vector, retain_graph=True)  # J v
            inner = torch.einsum("knd,nd->kn", columns, pushed.reshape(columns.shape[1:]))
            back = torch.einsum("knd,kn->nd", columns, inner).view_as(outputs)
            results.append(torch.autograd.grad(outputs, leaf, back, retain_graph=True)[0])
        return torch.stack(results)


def weights_function(joint: Joint, theta: Tensor) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """(rebuild, random): `rebuild(random)` is the weight vector with the random weights replaced."""
    index = joint.random_indices
    weights = theta[: joint.num_weights].detach()
    if index is None:
        return (lambda random: random), weights.clone()
    return (lambda random: weights.index_copy(0, index, random)), weights[index]
