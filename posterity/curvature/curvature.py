"""Curvatures of the negative log-likelihood (Gauss-Newton, Hessian, Fisher) and their sums over a batch."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import ClassVar

import torch
from torch import Tensor

from posterity.curvature.derivatives import Piece, derivatives
from posterity.curvature.survey import Place, survey, torch_kernels
from posterity.errors import positive_whole
from posterity.jacobians.jacobian import Stacked
from posterity.jacobians.linear import Thin
from posterity.likelihoods.likelihood import Likelihood
from posterity.model.data import Batch
from posterity.model.density import Density
from posterity.model.joint import Joint
from posterity.model.network import Buffers
from posterity.model.problem import Problem
from posterity.model.weights import entry_weights, output_weights, row_weights, weighted_log_prob
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
                    if (weights := self._output_weights(piece.outputs, rows)) is not None:
                        slope = slope * weights
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
        weights = self._output_weights(outputs, slice(low, low + len(outputs)))
        return columns if weights is None else columns * weights.sqrt()

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
            return -weighted_log_prob(likelihood, outputs, batch.targets, batch.weights).sum()

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


@dataclass(frozen=True)
class GaussNewton(Curvature):
    """The generalised Gauss-Newton matrix: the Hessian without the curvature of the network itself.

    **Math**: G = sum_n w_n J_n^T F_n J_n, J_n = d f(x_n) / d theta, F_n the likelihood's `output_fisher`. Its columns
    are a root of F_n: C - 1 of them for C classes.

    **Limit**: positive semi-definite always; equals the Hessian when f is linear in theta, or at zero residuals.

    **Cost**: a forward pass, and a backward pass for each column.

    **References**: Schraudolph (2002); Martens (2020), section 8.

    **Example**:

    >>> import torch, posterity as po
    >>> from posterity.model import Batch
    >>> noise, prior = po.likelihoods.Gaussian(scale=0.5), po.priors.Normal()
    >>> joint = po.Joint(torch.nn.Linear(1, 1, bias=False), noise, prior, num_data=2)
    >>> batch = Batch(torch.tensor([[1.0], [2.0]]), torch.zeros(2, 1))
    >>> GaussNewton().matrix(joint, torch.zeros(1), batch, None)  # (1 + 4) / 0.25
    tensor([[20.]], dtype=torch.float64)
    """

    def columns(self, likelihood: Likelihood, outputs: Tensor, targets: Tensor, key: Key) -> Tensor:
        return likelihood.output_root(outputs, outputs.dim() - 1)


@dataclass(frozen=True)
class Hessian(Curvature):
    """The exact Hessian of -log p(D | theta).

    **Math**: H = - sum_n w_n d^2 log p(y_n | f_theta(x_n)) / d theta^2.

    **Limit**: exact, but indefinite away from a mode of the likelihood; with the prior it must be positive
    definite at a mode of the posterior.

    **Cost**: R backward passes of the gradient, in chunks; with a structure that asks for products only (`LowRank`,
    `Hutchinson`), one for each product.

    **References**: MacKay (1992), A practical Bayesian framework for backpropagation networks.

    **Example**:

    >>> import torch
    >>> from posterity import Density
    >>> density = Density(lambda u: 7.0 * u - 2.0 * u.exp(), {"u": ()}, dtype=torch.float64)
    >>> Hessian().matrix(density, torch.tensor([3.5], dtype=torch.float64).log(), None, None)
    tensor([[7.]], dtype=torch.float64)
    """

    factored: ClassVar[bool] = False

    def columns(self, likelihood: Likelihood, outputs: Tensor, targets: Tensor, key: Key) -> Tensor:
        raise TypeError(
            "The Hessian has no columns, because it need not be positive semi-definite. Use GaussNewton() for "
            "structures made of them, or one of Full(), BlockDiagonal(), Diagonal(), LowRank() and Hutchinson()."
        )


@dataclass(frozen=True)
class MonteCarloFisher(Curvature):
    """An unbiased estimate of the Gauss-Newton matrix from targets drawn from the model itself.

    **Math**: sum_n w_n 1/K sum_k g_nk g_nk^T, g_nk = d log p(y_nk | f(x_n)) / d theta with y_nk ~ p(y | f(x_n)), and
    K = `samples`.

    **Limit**: expectation `GaussNewton`; the noise falls as 1 / sqrt(K N).

    **Cost**: a forward pass and K backward passes, however many outputs there are.

    **References**: Martens (2020), section 5; Kunstner et al. (2019).

    **Example**:

    >>> import posterity as po
    >>> from posterity.model import Batch
    >>> joint = po.Joint(torch.nn.Linear(1, 2), po.likelihoods.Categorical(), po.priors.Normal(), num_data=1)
    >>> batch = Batch(torch.ones(1, 1), torch.zeros(1, dtype=torch.long))
    >>> exact = po.curvature.GaussNewton().matrix(joint, torch.zeros(4), batch, None)
    >>> drawn = MonteCarloFisher(samples=1).matrix(joint, torch.zeros(4), batch, None)
    >>> torch.allclose(drawn, exact)  # exact for two classes at even odds
    True
    """

    samples: int = 1

    def __post_init__(self) -> None:
        positive_whole("MonteCarloFisher.samples", self.samples)

    def num_columns(self, outputs: int) -> int:
        return self.samples

    def columns(self, likelihood: Likelihood, outputs: Tensor, targets: Tensor, key: Key) -> Tensor:
        drawn = (likelihood.sample(outputs, key.fold(number)) for number in range(self.samples))
        return torch.stack([score(likelihood, outputs, y) for y in drawn]) / float(self.samples**0.5)


@dataclass(frozen=True)
class EmpiricalFisher(Curvature):
    """The sum of outer products of the gradients at the observed targets.

    **Math**: sum_n w_n g_n g_n^T, g_n = d log p(y_n | f(x_n)) / d theta at the observed y_n.

    **Limit**: equals the Fisher matrix only where the model has the right distribution of y; it vanishes as the
    residuals do, so it underestimates the curvature of a model that fits its data closely.

    **Cost**: a forward and a backward pass.

    **References**: Kunstner et al. (2019), Limitations of the empirical Fisher approximation.

    **Example**:

    >>> import posterity as po
    >>> from posterity.model import Batch
    >>> noise = po.likelihoods.Gaussian(scale=1.0)
    >>> joint = po.Joint(torch.nn.Linear(1, 1, bias=False), noise, po.priors.Normal(), num_data=1)
    >>> EmpiricalFisher().matrix(joint, torch.zeros(1), Batch(torch.ones(1, 1), torch.full((1, 1), 3.0)), None)
    tensor([[9.]], dtype=torch.float64)
    """

    scales_with_noise: ClassVar[bool] = False

    def num_columns(self, outputs: int) -> int:
        return 1

    def columns(self, likelihood: Likelihood, outputs: Tensor, targets: Tensor, key: Key) -> Tensor:
        return score(likelihood, outputs, targets).unsqueeze(0)
