"""A Gamma distribution for each component."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from posterity.mixtures.covariance import Covariance
from posterity.mixtures.precisions import Precisions, raised
from posterity.mixtures.spherical import Spherical


@dataclass(frozen=True)
class SphericalPrecisions(Precisions):
    """Lambda_k = lambda_k I, lambda_k ~ Gamma(nu_k / 2, rate = W_k^-1 / 2), storage (R, K)."""

    covariance: ClassVar[Covariance] = Spherical()

    def block(self, dimensions: int) -> tuple[int, int]:
        """One number."""
        return 1, 1

    def multiplicity(self, dimensions: int) -> int:
        """In every dimension."""
        return dimensions

    def prior_shape(self, dimensions: int) -> tuple[int, ...]:
        """One number."""
        return ()

    def stored(self, matrix: Tensor) -> Tensor:
        """The mean of its diagonal, (1, 1)."""
        return matrix.diagonal().mean()[None, None]

    def floored(self, stored: Tensor, floor: float) -> Tensor:
        """All of it."""
        return raised(stored, floor)

    def condition(self, stored: Tensor) -> float:
        """1: nothing cancels."""
        return 1.0

    def gained_degrees(self, counts: Tensor, dimensions: int) -> Tensor:
        """nu_k = nu_0 + D N_k: each row brings D squares."""
        return dimensions * counts

    def outer(self, weights: Tensor, vectors: Tensor) -> Tensor:
        """Its trace, (R, K)."""
        return weights * vectors.square().sum(-1)

    def broadcast(self, degrees: Tensor) -> Tensor:
        """(R, K)."""
        return degrees

    def log_det(self, factors: Tensor) -> Tensor:
        """(R, K)."""
        return 2 * factors.log()

    def trace(self, factors: Tensor, moments: Tensor) -> Tensor:
        """(R, K)."""
        return factors.square() * moments

    def squares(self, points: Tensor, means: Tensor, factors: Tensor) -> Tensor:
        """(N, K, 1)."""
        return ((points[:, None] - means) * factors[:, None]).square().sum(-1, keepdim=True)
