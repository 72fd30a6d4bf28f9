"""One full covariance for all components."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from posterity.mixtures.covariance import Covariance
from posterity.mixtures.full import inverse_roots, moved
from posterity.mixtures.precisions import Precisions, condition_of, raised
from posterity.mixtures.sweeps import Components, MatrixSweep, SharedSweep, Statistics, Sweep, suffice


@dataclass(frozen=True)
class Tied(Covariance):
    """All components share a covariance matrix; storage (D, D).

    >>> Tied().shape(3, 2), Tied().num_parameters(3, 2)
    ((2, 2), 3)
    """

    name: ClassVar[str] = "tied"
    matrices: ClassVar[bool] = True

    def shape(self, components: int, dimensions: int) -> tuple[int, ...]:
        return dimensions, dimensions

    def num_parameters(self, components: int, dimensions: int) -> int:
        return dimensions * (dimensions + 1) // 2

    def factors(self, covariances: Tensor) -> Tensor:
        """The inverse of the Cholesky factor, transposed: upper triangular (R, D, D)."""
        return inverse_roots(covariances)

    def half_log_det(self, factors: Tensor, components: int, dimensions: int) -> Tensor:
        """The sum of the logarithms of the diagonal, for each component (R, K)."""
        return factors.diagonal(dim1=-2, dim2=-1).log().sum(-1, keepdim=True).expand(-1, components)

    def second_moments(self, statistics: Statistics) -> Tensor:
        """The scatter less sum_k counts_k shift_k shift_k^T (R, D, D)."""
        return statistics.scatters - moved(statistics).sum(1)

    def dense(self, covariances: Tensor, components: int, dimensions: int) -> Tensor:
        return covariances[:, None].expand(-1, components, -1, -1)

    def sweep(self, components: Components, num_data: int) -> Sweep:
        """Components of unit covariance in whitened coordinates; far apart, as with a matrix for each component."""
        whitened = components.means @ components.factors  # (R, K, D)
        if suffice(whitened.square().sum(-1) + whitened.shape[-1]):
            return SharedSweep(components, whitened, num_data)
        factors = components.factors[:, None].expand(-1, whitened.shape[1], -1, -1)
        return MatrixSweep(components._replace(factors=factors), num_data)

    def stored(self, scatters: Tensor) -> Tensor:
        """Added over components, where the sweep has not done so."""
        return scatters.sum(1)

    def divisors(self, counts: Tensor, dimensions: int, added: float = 0.0) -> Tensor:
        return (counts.sum(-1) + added)[:, None, None]

    def marked(self, chosen: Tensor) -> Tensor:
        return torch.zeros_like(chosen[:, :1, None])

    def log_determinants(self, factors: Tensor, components: int, dimensions: int) -> Tensor:
        return -2 * self.half_log_det(factors, 1, dimensions)[:, 0]


@dataclass(frozen=True)
class TiedPrecisions(Precisions):
    """Lambda ~ Wishart(W, nu) is the precision of every component, storage (R, D, D)."""

    covariance: ClassVar[Covariance] = Tied()

    def block(self, dimensions: int) -> tuple[int, int]:
        return dimensions, 1

    def multiplicity(self, dimensions: int) -> int:
        return 1

    def prior_shape(self, dimensions: int) -> tuple[int, ...]:
        return dimensions, dimensions

    def stored(self, matrix: Tensor) -> Tensor:
        return matrix[None]

    def floored(self, stored: Tensor, floor: float) -> Tensor:
        diagonal = raised(stored.diagonal(dim1=-2, dim2=-1), floor)
        return torch.diagonal_scatter(stored, diagonal, dim1=-2, dim2=-1)

    def condition(self, stored: Tensor) -> float:
        return condition_of(stored)

    def gained_degrees(self, counts: Tensor, dimensions: int) -> Tensor:
        return counts.sum(-1, keepdim=True)

    def outer(self, weights: Tensor, vectors: Tensor) -> Tensor:
        return (weights[..., None] * vectors).mT @ vectors

    def broadcast(self, degrees: Tensor) -> Tensor:
        return degrees[..., None]

    def log_det(self, factors: Tensor) -> Tensor:
        return 2 * factors.diagonal(dim1=-2, dim2=-1).log().sum(-1, keepdim=True)

    def trace(self, factors: Tensor, moments: Tensor) -> Tensor:
        return (factors * (moments @ factors)).sum((-2, -1))[..., None]

    def squares(self, points: Tensor, means: Tensor, factors: Tensor) -> Tensor:
        return ((points[:, None] - means) @ factors).square().sum(-1, keepdim=True)
