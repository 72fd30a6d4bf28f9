"""Second moments in the storage of each kind of covariance: what they are divided by, and their traces."""

import torch
from torch import Tensor

from posterity.mixtures.covariance import Covariance
from posterity.mixtures.full import Full
from posterity.mixtures.spherical import Spherical
from posterity.mixtures.tied import Tied


def is_matrix(kind: Covariance) -> bool:
    """Whether covariances are kept as matrices."""
    return isinstance(kind, (Full, Tied))


def divisors(kind: Covariance, counts: Tensor, dimensions: int, added: float = 0.0) -> Tensor:
    """What second moments (R, *shape) are divided by to be covariances: counts (R, K), with `added` to each matrix's.

    A spherical second moment is a trace, of D variances that are one.
    """
    if isinstance(kind, Tied):
        return (counts.sum(-1) + added)[:, None, None]
    counts = counts + added
    if isinstance(kind, Full):
        return counts[..., None, None]
    return dimensions * counts if isinstance(kind, Spherical) else counts[..., None]


def identity(kind: Covariance, dimensions: int, like: Tensor) -> Tensor:
    """The unit covariance, to be added to covariances (R, *shape)."""
    if is_matrix(kind):
        return torch.eye(dimensions, dtype=like.dtype, device=like.device)
    return torch.ones((), dtype=like.dtype, device=like.device)


def identity_moment(kind: Covariance, dimensions: int, like: Tensor) -> Tensor:
    """The second moment of unit covariance and count 1, to be added to second moments (R, *shape)."""
    unit = identity(kind, dimensions, like)
    return dimensions * unit if isinstance(kind, Spherical) else unit


def non_negative(moments: Tensor) -> Tensor:
    """Symmetric matrices (..., D, D), their eigenvalues raised to 1e-14 of the largest: enough for Cholesky."""
    values, vectors = torch.linalg.eigh(moments)
    least = (1e-14 * values[..., -1:]).clamp_min(0.0)
    found: Tensor = (vectors * torch.maximum(values, least)[..., None, :]) @ vectors.mT
    return (found + found.mT) / 2


def precisions(kind: Covariance, factors: Tensor) -> Tensor:
    """The inverse covariances (R, *shape) of whitening factors."""
    return factors @ factors.mT if is_matrix(kind) else factors.square()


def quadratic(kind: Covariance, factors: Tensor, moments: Tensor) -> Tensor:
    """The sum over matrices of tr(S^-1 M), (R,), from factors and second moments (R, *shape)."""
    # For matrices as |A^T M A| on the diagonal: the inverse of a narrow covariance would cancel digits.
    products = (factors * (moments @ factors)) if is_matrix(kind) else factors.square() * moments
    return products.flatten(1).sum(-1)


def log_determinants(kind: Covariance, factors: Tensor, components: int, dimensions: int) -> Tensor:
    """The sum of log det S over the matrices that there are, (R,): a tied one counts once."""
    each = -2 * kind.half_log_det(factors, components, dimensions)  # (R, K)
    return each[:, 0] if isinstance(kind, Tied) else each.sum(-1)


def per_component(kind: Covariance, chosen: Tensor) -> Tensor:
    """A mark on components (R, K) as one on covariances (R, *shape); those that are shared are never marked."""
    if isinstance(kind, Tied):
        return torch.zeros_like(chosen[:, :1, None])
    if isinstance(kind, Spherical):
        return chosen
    return chosen[..., None, None] if isinstance(kind, Full) else chosen[..., None]
