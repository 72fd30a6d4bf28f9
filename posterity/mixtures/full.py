"""Full covariances, one for each component."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from posterity.errors import NotPositiveDefinite
from posterity.mixtures.covariance import Covariance
from posterity.mixtures.precisions import Precisions, condition_of, raised
from posterity.mixtures.sweeps import Components, Statistics, Sweep, matrix_sweep


@dataclass(frozen=True)
class Full(Covariance):
    """Each component has a covariance matrix of its own; storage (K, D, D).

    >>> Full().shape(3, 2), Full().num_parameters(3, 2)
    ((3, 2, 2), 9)
    """

    name: ClassVar[str] = "full"
    matrices: ClassVar[bool] = True

    def shape(self, components: int, dimensions: int) -> tuple[int, ...]:
        return components, dimensions, dimensions

    def num_parameters(self, components: int, dimensions: int) -> int:
        return components * dimensions * (dimensions + 1) // 2

    def factors(self, covariances: Tensor) -> Tensor:
        """The inverse of the Cholesky factor, transposed: upper triangular (R, K, D, D)."""
        return inverse_roots(covariances)

    def half_log_det(self, factors: Tensor, components: int, dimensions: int) -> Tensor:
        return factors.diagonal(dim1=-2, dim2=-1).log().sum(-1)

    def second_moments(self, statistics: Statistics) -> Tensor:
        """The scatters less counts shift shift^T (R, K, D, D)."""
        return statistics.scatters - moved(statistics)

    def dense(self, covariances: Tensor, components: int, dimensions: int) -> Tensor:
        return covariances

    def sweep(self, components: Components, num_data: int) -> Sweep:
        """Products of coordinates where these suffice, else whitened distances."""
        return matrix_sweep(components, num_data)

    def stored(self, scatters: Tensor) -> Tensor:
        return scatters

    def divisors(self, counts: Tensor, dimensions: int, added: float = 0.0) -> Tensor:
        return (counts + added)[..., None, None]

    def marked(self, chosen: Tensor) -> Tensor:
        return chosen[..., None, None]


def inverse_roots(covariances: Tensor) -> Tensor:
    """A = L^-T (..., D, D), upper triangular, where L L^T is the covariance: (x - mean) A has unit covariance."""
    roots, failed = torch.linalg.cholesky_ex(covariances)
    if bool((failed > 0).any() | ~torch.isfinite(roots).all()):
        bad = (failed > 0) | ~torch.isfinite(roots).all(-1).all(-1)
        refuse(bad)
    identity = torch.eye(roots.shape[-1], dtype=roots.dtype, device=roots.device)
    inverses: Tensor = torch.linalg.solve_triangular(roots, identity.expand_as(roots), upper=False)
    return inverses.mT


def refuse(bad: Tensor) -> None:
    """Raise for the first covariance that is marked: (R,) for one that is shared, (R, K) for one of each component."""
    place = bad.nonzero()[0].tolist()
    whose = f"of component {place[1]}" if len(place) > 1 else "that the components share"
    where = f" in restart {place[0]}" if len(bad) > 1 else ""
    raise NotPositiveDefinite(
        f"The covariance {whose}{where} is not positive definite. Ask for fewer components or a larger reg_covar."
    )


def moved(statistics: Statistics) -> Tensor:
    """counts shift shift^T (R, K, D, D): the part of the scatters about the old means that the new means take away."""
    return statistics.counts[..., None, None] * statistics.shifts[..., :, None] * statistics.shifts[..., None, :]


def non_negative(moments: Tensor) -> Tensor:
    """Symmetric matrices (..., D, D), their eigenvalues raised to 1e-14 of the largest: enough for Cholesky."""
    values, vectors = torch.linalg.eigh(moments)
    least = (1e-14 * values[..., -1:]).clamp_min(0.0)
    found: Tensor = (vectors * torch.maximum(values, least)[..., None, :]) @ vectors.mT
    return (found + found.mT) / 2


@dataclass(frozen=True)
class FullPrecisions(Precisions):
    """Lambda_k ~ Wishart(W_k, nu_k), storage (R, K, D, D)."""

    covariance: ClassVar[Covariance] = Full()

    def block(self, dimensions: int) -> tuple[int, int]:
        return dimensions, 1

    def multiplicity(self, dimensions: int) -> int:
        return 1

    def prior_shape(self, dimensions: int) -> tuple[int, ...]:
        return dimensions, dimensions

    def stored(self, matrix: Tensor) -> Tensor:
        return matrix[None, None]

    def floored(self, stored: Tensor, floor: float) -> Tensor:
        diagonal = raised(stored.diagonal(dim1=-2, dim2=-1), floor)
        return torch.diagonal_scatter(stored, diagonal, dim1=-2, dim2=-1)

    def condition(self, stored: Tensor) -> float:
        return condition_of(stored)

    def gained_degrees(self, counts: Tensor, dimensions: int) -> Tensor:
        return counts

    def outer(self, weights: Tensor, vectors: Tensor) -> Tensor:
        return weights[..., None, None] * vectors[..., :, None] * vectors[..., None, :]

    def broadcast(self, degrees: Tensor) -> Tensor:
        return degrees[..., None, None]

    def log_det(self, factors: Tensor) -> Tensor:
        return 2 * factors.diagonal(dim1=-2, dim2=-1).log().sum(-1)

    def trace(self, factors: Tensor, moments: Tensor) -> Tensor:
        return (factors * (moments @ factors)).sum((-2, -1))

    def squares(self, points: Tensor, means: Tensor, factors: Tensor) -> Tensor:
        ways = [((points - mean) @ factor).square().sum(-1) for mean, factor in zip(means, factors, strict=True)]
        return torch.stack(ways, -1)[..., None]
