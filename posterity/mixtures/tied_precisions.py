"""One Wishart matrix for all components."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from posterity.mixtures.covariance import Covariance
from posterity.mixtures.precisions import Precisions, condition_of, raised
from posterity.mixtures.tied import Tied


@dataclass(frozen=True)
class TiedPrecisions(Precisions):
    """Lambda ~ Wishart(W, nu) is the precision of every component, storage (R, D, D)."""

    covariance: ClassVar[Covariance] = Tied()

    def block(self, dimensions: int) -> tuple[int, int]:
        """One D by D matrix."""
        return dimensions, 1

    def multiplicity(self, dimensions: int) -> int:
        """Once."""
        return 1

    def prior_shape(self, dimensions: int) -> tuple[int, ...]:
        """A matrix."""
        return dimensions, dimensions

    def stored(self, matrix: Tensor) -> Tensor:
        """The matrix, (1, D, D)."""
        return matrix[None]

    def floored(self, stored: Tensor, floor: float) -> Tensor:
        """On the diagonal alone."""
        diagonal = raised(stored.diagonal(dim1=-2, dim2=-1), floor)
        return torch.diagonal_scatter(stored, diagonal, dim1=-2, dim2=-1)

    def condition(self, stored: Tensor) -> float:
        """Of the correlations."""
        return condition_of(stored)

    def gained_degrees(self, counts: Tensor, dimensions: int) -> Tensor:
        """nu = nu_0 + sum_k N_k, (R, 1)."""
        return counts.sum(-1, keepdim=True)

    def outer(self, weights: Tensor, vectors: Tensor) -> Tensor:
        """Summed over components, (R, D, D)."""
        return (weights[..., None] * vectors).mT @ vectors

    def broadcast(self, degrees: Tensor) -> Tensor:
        """(R, 1, 1)."""
        return degrees[..., None]

    def log_det(self, factors: Tensor) -> Tensor:
        """(R, 1)."""
        return 2 * factors.diagonal(dim1=-2, dim2=-1).log().sum(-1, keepdim=True)

    def trace(self, factors: Tensor, moments: Tensor) -> Tensor:
        """(R, 1)."""
        return (factors * (moments @ factors)).sum((-2, -1))[..., None]

    def squares(self, points: Tensor, means: Tensor, factors: Tensor) -> Tensor:
        """(N, K, 1)."""
        return ((points[:, None] - means) @ factors).square().sum(-1, keepdim=True)
