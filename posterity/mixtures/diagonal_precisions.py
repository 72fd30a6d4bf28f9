"""A Gamma distribution for each component and dimension."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from posterity.mixtures.covariance import Covariance
from posterity.mixtures.diagonal import Diagonal
from posterity.mixtures.precisions import Precisions, raised


@dataclass(frozen=True)
class DiagonalPrecisions(Precisions):
    """lambda_kd ~ Gamma(nu_k / 2, rate = W_kd^-1 / 2), independent: Wishart at p = 1, storage (R, K, D)."""

    covariance: ClassVar[Covariance] = Diagonal()

    def block(self, dimensions: int) -> tuple[int, int]:
        """D numbers."""
        return 1, dimensions

    def multiplicity(self, dimensions: int) -> int:
        """Once."""
        return 1

    def prior_shape(self, dimensions: int) -> tuple[int, ...]:
        """A vector."""
        return (dimensions,)

    def stored(self, matrix: Tensor) -> Tensor:
        """Its diagonal, (1, 1, D)."""
        return matrix.diagonal()[None, None]

    def floored(self, stored: Tensor, floor: float) -> Tensor:
        """All of it."""
        return raised(stored, floor)

    def condition(self, stored: Tensor) -> float:
        """1: nothing cancels."""
        return 1.0

    def gained_degrees(self, counts: Tensor, dimensions: int) -> Tensor:
        """nu_k = nu_0 + N_k."""
        return counts

    def outer(self, weights: Tensor, vectors: Tensor) -> Tensor:
        """Its diagonal, (R, K, D)."""
        return weights[..., None] * vectors.square()

    def broadcast(self, degrees: Tensor) -> Tensor:
        """(R, K, 1)."""
        return degrees[..., None]

    def log_det(self, factors: Tensor) -> Tensor:
        """(R, K)."""
        return 2 * factors.log().sum(-1)

    def trace(self, factors: Tensor, moments: Tensor) -> Tensor:
        """(R, K)."""
        return (factors.square() * moments).sum(-1)

    def squares(self, points: Tensor, means: Tensor, factors: Tensor) -> Tensor:
        """(N, K, D)."""
        return ((points[:, None] - means) * factors).square()
