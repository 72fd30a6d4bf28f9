"""Curvatures of the negative log-likelihood: Gauss-Newton, Hessian, Fisher; their sums over the rows of a batch."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import ClassVar

import torch
from torch import Tensor

from posterity.curvature.derivatives import Piece, derivatives
from posterity.curvature.survey import survey, torch_kernels
from posterity.errors import positive_whole
from posterity.jacobians.jacobian import Stacked
from posterity.jacobians.linear import Thin
from posterity.likelihoods.likelihood import Likelihood
from posterity.model.data import Batch
from posterity.model.density import Density
from posterity.model.joint import Joint
from posterity.model.network import Buffers
from posterity.model.problem import Problem
from posterity.numerics.autodiff import dense_hessian
from posterity.numerics.layout import Block
from posterity.numerics.random import Key


class Curvature(ABC):
    """A symmetric matrix that stands for the Hessian of -log p(D | theta) over the random weights.

    Sums over the rows of a batch: untempered, unscaled, without the prior. Most have the form sum_n J_n^T S_n S_n^T J_n
    with columns S_n in the space of the outputs; a `Structure` says how much of the matrix is kept.
    """

    factored: ClassVar[bool] = True
    """Whether it has columns."""

    scales_with_noise: ClassVar[bool] = True
    """Whether, under Gaussian noise, it goes as the inverse square of the noise scale."""

    @abstractmethod
    def columns(self, likelihood: Likelihood, outputs: Tensor, targets: Tensor, key: Key) -> Tensor:
        """S for each row, (K, n, *event), at outputs (n, *event)."""

    def num_columns(self, outputs: int) -> int:
        """How many columns K a row has at most, with this many outputs."""
        return outputs

    def matrix(
        self, joint: Problem, theta: Tensor, batch: Batch | None, buffers: Buffers | None, seed: int = 0
    ) -> Tensor:
        """The dense matrix (R, R) in float64, for one theta (P,)."""
        return Rows(self, joint, theta, batch, buffers, Key(seed)).matrix()

    def diagonal(
        self, joint: Problem, theta: Tensor, batch: Batch | None, buffers: Buffers | None, seed: int = 0
    ) -> Tensor:
        """Its diagonal (R,) in float64, for one theta (P,)."""
        return Rows(self, joint, theta, batch, buffers, Key(seed)).diagonal()


def score(likelihood: Likelihood, outputs: Tensor, targets: Tensor) -> Tensor:
    """d log p(y | f) / d f for each row, (n, *event)."""
    leaf = outputs.detach().requires_grad_()
    with torch.enable_grad():
        value = likelihood.log_prob(leaf, targets).sum()
    (grad,) = torch.autograd.grad(value, leaf)
    return grad


WHOLE_SLOPE = 20_000  # weights up to which the gradient is taken in all of them, by a backward pass of its own


class Rows:
    """Takes a curvature, a problem, one theta (P,), a batch and a key; everything is computed when it is asked for."""

    def __init__(
        self,
        curvature: "Curvature",
        joint: Problem,
        theta: Tensor,
        batch: Batch | None,
        buffers: Buffers | None,
        key: Key,
        budget: int | None = None,
    ) -> None:
        """Nothing is computed yet."""
        self.curvature, self.joint, self.theta, self.batch = curvature, joint, theta, batch
        self.buffers, self.key, self.budget = buffers, key, budget
        self._outputs: list[Tensor] = []
        self._head_slope: Tensor | None = None

    @property
    def factored(self) -> bool:
        """Whether `jacobians` are to be had."""
        return self.curvature.factored

    @property
    def weights(self) -> Tensor | None:
        """Weights of the rows, None where each counts once."""
        return None if self.batch is None else self.batch.weights

    @property
    def size(self) -> int:
        """R."""
        return self.joint.num_random

    def jacobians(self) -> Iterator[Piece]:
        """Factors J_n^T S_n whose products add up to the curvature."""
        if not isinstance(self.joint, Joint):
            raise TypeError(
                f"A Density has no network outputs, so no {type(self.curvature).__name__} matrix. "
                "Use the curvature Hessian()."
            )
        assert self.batch is not None
        self._outputs, self._head_slope = [], None
        inputs = self.batch.inputs
        known = survey(self.joint, inputs)
        count = self.curvature.num_columns(max(1, prod(known.event)))
        for piece in derivatives(
            self.joint, self.theta, inputs, self.buffers, self._columns, count=count, budget=self.budget
        ):
            if piece.fresh:
                self._outputs.append(piece.outputs)
                if known.head is not None and isinstance(piece.jacobian, Stacked):
                    self._add_head_slope(piece, known.head)
            yield piece

    def _add_head_slope(self, piece: Piece, head: Block) -> None:
        """Add the gradient of the log-likelihood in the weights of the output layer, for which no pass is needed."""
        assert isinstance(piece.jacobian, Stacked)
        assert self.batch is not None
        part = piece.jacobian.part(head)
        assert isinstance(part, Thin)
        rows = slice(piece.low, piece.low + len(piece.outputs))
        slope = score(self.likelihood, piece.outputs, self.batch.targets[rows])
        if self.weights is not None:
            slope = slope * self.weights[rows].unsqueeze(-1).to(slope.dtype)
        found = (slope.T @ part.inputs).flatten().to(torch.float64)
        self._head_slope = found if self._head_slope is None else self._head_slope + found

    def slope(self) -> Tensor:
        """Gradient of the log-likelihood (R,) in float64.

        After `jacobians` of a large network that ends in a linear layer: in that layer alone, by its block, since a
        pass of its own would cost as much as they did.
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
        """Outputs at the rows (n, *event); those of `jacobians` where it was called."""
        assert isinstance(self.joint, Joint)
        assert self.batch is not None
        if not self._outputs:
            with torch.no_grad():
                self._outputs = [self.joint.outputs(self.theta, self.batch.inputs, self.buffers)]
        return torch.cat(self._outputs)

    def _columns(self, outputs: Tensor, low: int) -> Tensor:
        assert self.batch is not None
        targets = self.batch.targets[low : low + len(outputs)]
        columns = self.curvature.columns(self.likelihood, outputs, targets, self.key.fold(low)).detach()
        if self.weights is None:
            return columns
        root = self.weights[low : low + len(outputs)].sqrt().to(columns.dtype)
        return columns * root.view(-1, *[1] * (outputs.dim() - 1))

    @property
    def likelihood(self) -> Likelihood:
        """The joint's likelihood with the learnt parameters that theta (P,) ends in."""
        joint = self.joint
        assert isinstance(joint, Joint)
        return joint.likelihood.with_free(joint.split(self.theta)[1]) if joint.likelihood.num_free else joint.likelihood

    def log_likelihood(self) -> Tensor:
        """Sum over the rows of w_n log p(y_n | f_n), in float64; from the outputs of `jacobians` if it was called."""
        if isinstance(self.joint, Density):
            return self.joint.log_density(self.theta).detach().to(torch.float64)
        assert self.batch is not None
        with torch.no_grad():
            rows = self.likelihood.log_prob(self.outputs(), self.batch.targets).to(torch.float64)
            return rows.sum() if self.weights is None else (rows * self.weights).sum()

    def matrix(self) -> Tensor:
        """The dense matrix (R, R), in float64."""
        if not self.factored:
            return self._hessian().to(torch.float64)
        total: Tensor | None = None
        for piece in self.jacobians():
            for _, part in piece.jacobian.chunks():
                rows = part.rows().flatten(0, 1).to(torch.float64)
                value = rows.T @ rows
                total = value if total is None else total.add_(value)
        assert total is not None
        return 0.5 * (total + total.mT)  # a product is symmetric to rounding only

    def diagonal(self) -> Tensor:
        """The diagonal (R,), in float64; of a curvature without columns it comes from the whole matrix."""
        return (self.squares() if self.factored else self.matrix().diagonal()).to(torch.float64)

    def squares(self, out: Tensor | None = None) -> Tensor:
        """The diagonal (R,) of a curvature with columns, in the number type of the weights, added to `out`."""
        total = torch.zeros(self.size, dtype=self.theta.dtype, device=self.theta.device) if out is None else out
        for piece in self.jacobians():
            if isinstance(piece.jacobian, Stacked):
                piece.jacobian.accumulate_squares(total)
            else:
                total.add_(piece.jacobian.squares())
        return total

    def _negative(self) -> tuple[Callable[[Tensor], Tensor], Tensor]:
        """(-log-likelihood of the rows as a function of the random weights, their values)."""
        joint, batch = self.joint, self.batch
        if isinstance(joint, Density):
            return (lambda theta: -joint.log_density(theta)), self.theta.detach()
        assert isinstance(joint, Joint)
        assert batch is not None
        rebuild, random = weights_function(joint, self.theta)
        likelihood = self.likelihood

        def negative(weights: Tensor) -> Tensor:
            outputs = joint.network.outputs(rebuild(weights), batch.inputs, self.buffers)
            rows = likelihood.log_prob(outputs, batch.targets)
            return -(rows.sum() if batch.weights is None else (rows * batch.weights).sum())

        return negative, random

    def _hessian(self) -> Tensor:
        negative, random = self._negative()
        if self.joint.network is None:
            return dense_hessian(negative, random)
        with torch_kernels(self.joint.network):
            return dense_hessian(negative, random)

    def products(self, vectors: Tensor) -> Tensor:
        """The curvature times each of the vectors (m, R), in float64, without forming it."""
        if self.joint.network is None:
            return vectors.to(torch.float64) @ self.matrix()
        with torch_kernels(self.joint.network), torch.enable_grad():
            wanted = vectors.to(self.theta.dtype)
            found = self._factored_products(wanted) if self.factored else self._hessian_products(wanted)
        return found.to(torch.float64)

    def _hessian_products(self, vectors: Tensor) -> Tensor:
        negative, random = self._negative()
        leaf = random.requires_grad_()
        (grad,) = torch.autograd.grad(negative(leaf), leaf, create_graph=True)
        return torch.stack([torch.autograd.grad(grad, leaf, vector, retain_graph=True)[0] for vector in vectors])

    def _factored_products(self, vectors: Tensor) -> Tensor:
        """J^T S S^T J v: J v is the derivative in u of v . (J^T u), which is linear in u."""
        joint, batch = self.joint, self.batch
        assert isinstance(joint, Joint)
        assert batch is not None
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
    """(rebuild, random): `rebuild(random)` is the whole weight vector with the random weights replaced."""
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
    >>> torch.allclose(drawn, exact)  # with two classes at even odds every draw tells all
    True
    """

    samples: int = 1

    def __post_init__(self) -> None:
        positive_whole("MonteCarloFisher.samples", self.samples)

    def num_columns(self, outputs: int) -> int:
        return self.samples

    def columns(self, likelihood: Likelihood, outputs: Tensor, targets: Tensor, key: Key) -> Tensor:
        drawn = (likelihood.sample(outputs, key.fold(number)) for number in range(self.samples))
        columns = torch.stack([score(likelihood, outputs, y) for y in drawn])
        return columns / float(self.samples**0.5)


@dataclass(frozen=True)
class EmpiricalFisher(Curvature):
    """The sum of squares of the gradients of the data themselves.

    **Math**: sum_n w_n g_n g_n^T, g_n = d log p(y_n | f(x_n)) / d theta at the observed y_n.

    **Limit**: equals the Fisher matrix only where the model has the right distribution of y; it vanishes as the
    residuals do, so it says too little about a model that fits its data closely. Cheap, and no more than that.

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
