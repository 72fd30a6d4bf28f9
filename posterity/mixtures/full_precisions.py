"""One Wishart matrix for each component."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from posterity.mixtures.covariance import Covariance
from posterity.mixtures.full import Full
from posterity.mixtures.precisions import Precisions, condition_of, raised


@dataclass(frozen=True)
class FullPrecisions(Precisions):
    """Lambda_k ~ Wishart(W_k, nu_k), storage (R, K, D, D)."""

    covariance: ClassVar[Covariance] = Full()

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
        """The matrix, (1, 1, D, D)."""
        return matrix[None, None]

    def floored(self, stored: Tensor, floor: float) -> Tensor:
        """On the diagonal alone."""
        diagonal = raised(stored.diagonal(dim1=-2, dim2=-1), floor)
        return torch.diagonal_scatter(stored, diagonal, dim1=-2, dim2=-1)

    def condition(self, stored: Tensor) -> float:
        """Of the correlations."""
        return condition_of(stored)

    def gained_degrees(self, counts: Tensor, dimensions: int) -> Tensor:
        """nu_k = nu_0 + N_k."""
        return counts

    def outer(self, weights: Tensor, vectors: Tensor) -> Tensor:
        """(R, K, D, D)."""
        return weights[..., None, None] * vectors[..., :, None] * vectors[..., None, :]

    def broadcast(self, degrees: Tensor) -> Tensor:
        """(R, K, 1, 1)."""
        return degrees[..., None, None]

    def log_det(self, factors: Tensor) -> Tensor:
        """(R, K)."""
        return 2 * factors.diagonal(dim1=-2, dim2=-1).log().sum(-1)

    def trace(self, factors: Tensor, moments: Tensor) -> Tensor:
        """(R, K)."""
        return (factors * (moments @ factors)).sum((-2, -1))

    def squares(self, points: Tensor, means: Tensor, factors: Tensor) -> Tensor:
        """(N, K, 1)."""
        ways = [((points - mean) @ factor).square().sum(-1) for mean, factor in zip(means, factors, strict=True)]
        return torch.stack(ways, -1)[..., None]
