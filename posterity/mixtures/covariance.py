"""Kinds of covariance: their storage, estimation, whitening, and Wishart distributions of their inverses."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from posterity.errors import NotPositiveDefinite
from posterity.mixtures.sweeps import (
    Components,
    MatrixSweep,
    SharedSweep,
    Statistics,
    Sweep,
    matrix_sweep,
    scale_sweep,
    suffice,
)


class Covariance(ABC):
    """A kind of covariance of K components in D dimensions, with Wishart distributions of the precisions.

    All tensors have a leading axis of R restarts. Covariances, second moments and whitening factors A are kept as
    (R, *shape); covariances that all components share have no component axis, and counts and degrees of freedom
    (R, K) become (R, 1) for them. Under a Wishart distribution with scale W and nu degrees of freedom the factors are
    taken of W^-1 / nu, so that A A^T = nu W is the expected precision.
    """

    name: ClassVar[str]
    matrices: ClassVar[bool]  # whether covariances and factors are stored as matrices (..., D, D), else as variances
    shared: ClassVar[bool] = False  # whether all components have the same covariance

    @abstractmethod
    def single_shape(self, dimensions: int) -> tuple[int, ...]:
        """The shape in which a single covariance is stored."""

    @abstractmethod
    def factors(self, covariances: Tensor) -> Tensor:
        """The whitening A (R, *shape): (x - mean_k) A_k has unit covariance.

        Raises `NotPositiveDefinite`, naming the component, where there is none.
        """

    @abstractmethod
    def log_det(self, factors: Tensor) -> Tensor:
        """log det A A^T of each stored covariance, (R, K) or (R, 1)."""

    @abstractmethod
    def dense(self, covariances: Tensor, components: int, dimensions: int) -> Tensor:
        """The covariances as matrices (R, K, D, D)."""

    @abstractmethod
    def from_matrix(self, matrix: Tensor) -> Tensor:
        """Convert a matrix (D, D) to the kind's storage (1, *shape) at K = 1: its diagonal, or the diagonal's mean."""

    @abstractmethod
    def sweep(self, components: Components, num_data: int) -> Sweep:
        """The computation of scores and moments of `num_data` rows, chunk by chunk."""

    @abstractmethod
    def outer(self, weights: Tensor, vectors: Tensor) -> Tensor:
        """w_k v_k v_k^T in the kind's storage, from (R, K) and (R, K, D)."""

    @abstractmethod
    def trace(self, factors: Tensor, moments: Tensor) -> Tensor:
        """tr(A A^T M) of each stored covariance, for M in the kind's storage, (R, K) or (R, 1)."""

    @abstractmethod
    def block(self, dimensions: int) -> tuple[int, int]:
        """(p, copies): a component's precision consists of `copies` independent Wishart matrices, each p by p."""

    @abstractmethod
    def squares(self, points: Tensor, means: Tensor, factors: Tensor) -> Tensor:
        """|(x_n - m_k) A_k|^2 by independent matrix: (N, D), (K, D), (*shape) -> (N, K, copies)."""

    @abstractmethod
    def floored(self, stored: Tensor, floor: float) -> Tensor:
        """Covariances with variances raised by the share `floor`; zero variances become the floor."""

    @abstractmethod
    def condition(self, stored: Tensor) -> float:
        """The largest condition number of stored matrices, each scaled to a unit diagonal; 1 for variances."""

    @abstractmethod
    def identity(self, dimensions: int, like: Tensor) -> Tensor:
        """The unit covariance, which broadcasts with covariances (R, *shape)."""

    @abstractmethod
    def precisions(self, factors: Tensor) -> Tensor:
        """The inverse covariances (R, *shape) of whitening factors."""

    @abstractmethod
    def quadratic(self, factors: Tensor, moments: Tensor) -> Tensor:
        """The sum over covariances of tr(S^-1 M), (R,), from factors and second moments (R, *shape)."""

    def shape(self, components: int, dimensions: int) -> tuple[int, ...]:
        """The shape in which covariances and factors are stored."""
        single = self.single_shape(dimensions)
        return single if self.shared else (components, *single)

    def num_parameters(self, components: int, dimensions: int) -> int:
        """The number of free parameters."""
        size = dimensions * (dimensions + 1) // 2 if self.matrices else math.prod(self.single_shape(dimensions))
        return size if self.shared else components * size

    def multiplicity(self, dimensions: int) -> int:
        """How many times the stored covariance is repeated on the diagonal of the matrix (D, D)."""
        return 1

    def half_log_det(self, factors: Tensor, components: int, dimensions: int) -> Tensor:
        """log det A_k = -1/2 log det S_k, (R, K)."""
        return (self.multiplicity(dimensions) * self.log_det(factors) / 2).expand(-1, components)

    def log_determinants(self, factors: Tensor, dimensions: int) -> Tensor:
        """The sum of log det S over the stored covariances, (R,)."""
        return -(self.multiplicity(dimensions) * self.log_det(factors)).sum(-1)

    def second_moments(self, statistics: Statistics) -> Tensor:
        """sum_n w_n r_nk (x_n - m_k)(x_n - m_k)^T about the new means m (R, *shape), in this kind's storage."""
        return statistics.scatters - self.outer(statistics.counts, statistics.shifts)

    def stored(self, scatters: Tensor) -> Tensor:
        """The scatters of a sweep in this kind's storage (R, *shape)."""
        return scatters

    def pooled(self, counts: Tensor) -> Tensor:
        """Counts of rows by covariance, (R, K) or (R, 1), from counts by component (R, K)."""
        return counts.sum(-1, keepdim=True) if self.shared else counts

    def gained_degrees(self, counts: Tensor, dimensions: int) -> Tensor:
        """The degrees of freedom that counts (R, K) of rows add, (R, K) or (R, 1)."""
        return self.multiplicity(dimensions) * self.pooled(counts)

    def divisors(self, counts: Tensor, dimensions: int, added: float = 0.0) -> Tensor:
        """The divisors that turn second moments (R, *shape) into covariances: counts (R, K) plus `added`."""
        return self.broadcast(self.multiplicity(dimensions) * (self.pooled(counts) + added))

    def broadcast(self, numbers: Tensor) -> Tensor:
        """Reshape one number per covariance, (R, K) or (R, 1), to broadcast with the kind's storage."""
        return numbers.reshape(*numbers.shape, *(1,) * (len(self.shape(1, 1)) - 1))

    def marked(self, chosen: Tensor) -> Tensor:
        """Extend a mask of components (R, K) to covariances (R, *shape); a shared covariance is never chosen."""
        return self.broadcast(torch.zeros_like(chosen[:, :1]) if self.shared else chosen)

    def identity_moment(self, dimensions: int, like: Tensor) -> Tensor:
        """The second moment of unit covariance and count 1, which broadcasts with second moments (R, *shape)."""
        return self.multiplicity(dimensions) * self.identity(dimensions, like)


class _Matrices(Covariance):
    """Covariance matrices (..., D, D); their factors are upper triangular."""

    matrices: ClassVar[bool] = True

    def single_shape(self, dimensions: int) -> tuple[int, ...]:
        return dimensions, dimensions

    def factors(self, covariances: Tensor) -> Tensor:
        """The inverse of the Cholesky factor, transposed."""
        roots, failed = torch.linalg.cholesky_ex(covariances)
        if bool((failed > 0).any() | ~torch.isfinite(roots).all()):
            refuse((failed > 0) | ~torch.isfinite(roots).all(-1).all(-1))
        identity = torch.eye(roots.shape[-1], dtype=roots.dtype, device=roots.device)
        inverses: Tensor = torch.linalg.solve_triangular(roots, identity.expand_as(roots), upper=False)
        return inverses.mT

    def log_det(self, factors: Tensor) -> Tensor:
        return 2 * factors.diagonal(dim1=-2, dim2=-1).log().sum(-1, keepdim=self.shared)

    def trace(self, factors: Tensor, moments: Tensor) -> Tensor:
        traces = self._products(factors, moments).sum((-2, -1))
        return traces[:, None] if self.shared else traces

    def quadratic(self, factors: Tensor, moments: Tensor) -> Tensor:
        return self._products(factors, moments).flatten(1).sum(-1)

    def block(self, dimensions: int) -> tuple[int, int]:
        return dimensions, 1

    def floored(self, stored: Tensor, floor: float) -> Tensor:
        diagonal = raised(stored.diagonal(dim1=-2, dim2=-1), floor)
        return torch.diagonal_scatter(stored, diagonal, dim1=-2, dim2=-1)

    def condition(self, stored: Tensor) -> float:
        return condition_of(stored)

    def identity(self, dimensions: int, like: Tensor) -> Tensor:
        return torch.eye(dimensions, dtype=like.dtype, device=like.device)

    def precisions(self, factors: Tensor) -> Tensor:
        return factors @ factors.mT

    @staticmethod
    def _products(factors: Tensor, moments: Tensor) -> Tensor:
        """Entries whose sum is tr(A^T M A): the inverse of a narrow covariance would cancel digits."""
        return factors * (moments @ factors)


@dataclass(frozen=True)
class Full(_Matrices):
    """Each component has a covariance matrix of its own; storage (K, D, D), precisions Lambda_k ~ Wishart(W_k, nu_k).

    >>> Full().shape(3, 2), Full().num_parameters(3, 2)
    ((3, 2, 2), 9)
    """

    name: ClassVar[str] = "full"

    def dense(self, covariances: Tensor, components: int, dimensions: int) -> Tensor:
        return covariances

    def from_matrix(self, matrix: Tensor) -> Tensor:
        return matrix[None, None]

    def sweep(self, components: Components, num_data: int) -> Sweep:
        return matrix_sweep(components, num_data)

    def outer(self, weights: Tensor, vectors: Tensor) -> Tensor:
        return outer_products(weights, vectors)

    def squares(self, points: Tensor, means: Tensor, factors: Tensor) -> Tensor:
        pairs = zip(means, factors, strict=True)
        return torch.stack([((points - mean) @ factor).square().sum(-1) for mean, factor in pairs], -1)[..., None]


@dataclass(frozen=True)
class Tied(_Matrices):
    """All components share a covariance matrix; storage (D, D), precision Lambda ~ Wishart(W, nu).

    >>> Tied().shape(3, 2), Tied().num_parameters(3, 2)
    ((2, 2), 3)
    """

    name: ClassVar[str] = "tied"
    shared: ClassVar[bool] = True

    def dense(self, covariances: Tensor, components: int, dimensions: int) -> Tensor:
        return covariances[:, None].expand(-1, components, -1, -1)

    def from_matrix(self, matrix: Tensor) -> Tensor:
        return matrix[None]

    def sweep(self, components: Components, num_data: int) -> Sweep:
        # In whitened coordinates components have unit covariance; far from the centre each has its own matrix.
        whitened = components.means @ components.factors  # (R, K, D)
        if suffice(whitened.square().sum(-1) + whitened.shape[-1]):
            return SharedSweep(components, whitened, num_data)
        factors = components.factors[:, None].expand(-1, whitened.shape[1], -1, -1)
        return MatrixSweep(components._replace(factors=factors), num_data)

    def stored(self, scatters: Tensor) -> Tensor:
        return scatters.sum(1)

    def outer(self, weights: Tensor, vectors: Tensor) -> Tensor:
        return (weights[..., None] * vectors).mT @ vectors

    def second_moments(self, statistics: Statistics) -> Tensor:
        return statistics.scatters - outer_products(statistics.counts, statistics.shifts).sum(1)

    def squares(self, points: Tensor, means: Tensor, factors: Tensor) -> Tensor:
        return ((points[:, None] - means) @ factors).square().sum(-1, keepdim=True)


class _Variances(Covariance):
    """Variances of independent coordinates; their factors are 1 / standard deviation."""

    matrices: ClassVar[bool] = False

    def factors(self, covariances: Tensor) -> Tensor:
        good = torch.isfinite(covariances) & (covariances > 0)
        if not bool(good.all()):
            refuse(~good.reshape(*good.shape[:2], -1).all(-1))
        return covariances.rsqrt()

    def quadratic(self, factors: Tensor, moments: Tensor) -> Tensor:
        return (factors.square() * moments).flatten(1).sum(-1)

    def floored(self, stored: Tensor, floor: float) -> Tensor:
        return raised(stored, floor)

    def condition(self, stored: Tensor) -> float:
        return 1.0

    def identity(self, dimensions: int, like: Tensor) -> Tensor:
        return torch.ones((), dtype=like.dtype, device=like.device)

    def precisions(self, factors: Tensor) -> Tensor:
        return factors.square()


@dataclass(frozen=True)
class Diagonal(_Variances):
    """Each component has a variance of its own in each dimension; storage (K, D).

    Precisions lambda_kd ~ Gamma(nu_k / 2, rate = W_kd^-1 / 2) are independent: Wishart at p = 1.

    >>> Diagonal().shape(3, 2), Diagonal().num_parameters(3, 2)
    ((3, 2), 6)
    """

    name: ClassVar[str] = "diag"

    def single_shape(self, dimensions: int) -> tuple[int, ...]:
        return (dimensions,)

    def log_det(self, factors: Tensor) -> Tensor:
        return 2 * factors.log().sum(-1)

    def dense(self, covariances: Tensor, components: int, dimensions: int) -> Tensor:
        return torch.diag_embed(covariances)

    def from_matrix(self, matrix: Tensor) -> Tensor:
        return matrix.diagonal()[None, None]

    def sweep(self, components: Components, num_data: int) -> Sweep:
        return scale_sweep(components, num_data)

    def outer(self, weights: Tensor, vectors: Tensor) -> Tensor:
        return weights[..., None] * vectors.square()

    def trace(self, factors: Tensor, moments: Tensor) -> Tensor:
        return (factors.square() * moments).sum(-1)

    def block(self, dimensions: int) -> tuple[int, int]:
        return 1, dimensions

    def squares(self, points: Tensor, means: Tensor, factors: Tensor) -> Tensor:
        return ((points[:, None] - means) * factors).square()


@dataclass(frozen=True)
class Spherical(_Variances):
    """Each component has one variance for all dimensions; storage (K,).

    Its scatters and second moments are traces: a variance is the second moment over D times the count. Precisions are
    Lambda_k = lambda_k I with lambda_k ~ Gamma(nu_k / 2, rate = W_k^-1 / 2).

    >>> Spherical().shape(3, 2), Spherical().num_parameters(3, 2)
    ((3,), 3)
    """

    name: ClassVar[str] = "spherical"

    def single_shape(self, dimensions: int) -> tuple[int, ...]:
        return ()

    def multiplicity(self, dimensions: int) -> int:
        return dimensions

    def log_det(self, factors: Tensor) -> Tensor:
        return 2 * factors.log()

    def dense(self, covariances: Tensor, components: int, dimensions: int) -> Tensor:
        return torch.diag_embed(covariances[..., None].expand(-1, -1, dimensions))

    def from_matrix(self, matrix: Tensor) -> Tensor:
        return matrix.diagonal().mean()[None, None]

    def sweep(self, components: Components, num_data: int) -> Sweep:
        factors = components.factors[..., None].expand_as(components.means)
        return scale_sweep(components._replace(factors=factors), num_data)

    def stored(self, scatters: Tensor) -> Tensor:
        return scatters.sum(-1)

    def outer(self, weights: Tensor, vectors: Tensor) -> Tensor:
        return weights * vectors.square().sum(-1)

    def trace(self, factors: Tensor, moments: Tensor) -> Tensor:
        return factors.square() * moments

    def block(self, dimensions: int) -> tuple[int, int]:
        return 1, 1

    def squares(self, points: Tensor, means: Tensor, factors: Tensor) -> Tensor:
        return ((points[:, None] - means) * factors[:, None]).square().sum(-1, keepdim=True)


KINDS: dict[str, Covariance] = {kind.name: kind for kind in (Full(), Tied(), Diagonal(), Spherical())}


def refuse(bad: Tensor) -> None:
    """Raise `NotPositiveDefinite` for the first bad covariance: (R,) for shared ones, (R, K) otherwise."""
    first = bad.nonzero()[0].tolist()
    whose = f"of component {first[1]}" if len(first) > 1 else "that the components share"
    where = f" in restart {first[0]}" if len(bad) > 1 else ""
    raise NotPositiveDefinite(
        f"The covariance {whose}{where} is not positive definite. Ask for fewer components or a larger reg_covar."
    )


def outer_products(weights: Tensor, vectors: Tensor) -> Tensor:
    """w_k v_k v_k^T (R, K, D, D), from (R, K) and (R, K, D)."""
    return weights[..., None, None] * vectors[..., :, None] * vectors[..., None, :]


def non_negative(moments: Tensor) -> Tensor:
    """Raise the eigenvalues of symmetric matrices (..., D, D) to 1e-14 of the largest: enough for Cholesky."""
    values, vectors = torch.linalg.eigh(moments)
    least = (1e-14 * values[..., -1:]).clamp_min(0.0)
    matrices: Tensor = (vectors * torch.maximum(values, least)[..., None, :]) @ vectors.mT
    return (matrices + matrices.mT) / 2


def raised(variances: Tensor, floor: float) -> Tensor:
    """Variances times 1 + floor; zero variances become the floor."""
    return torch.where(variances > 0, variances * (1 + floor), floor)


def condition_of(matrices: Tensor) -> float:
    """The largest condition number of matrices (..., D, D) scaled to a unit diagonal."""
    scales = matrices.diagonal(dim1=-2, dim2=-1).sqrt()
    values = torch.linalg.eigvalsh(matrices / (scales[..., :, None] * scales[..., None, :]))
    return float((values[..., -1] / values[..., 0].clamp(min=torch.finfo(values.dtype).tiny)).max())
