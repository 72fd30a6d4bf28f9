"""One covariance matrix for all components."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from posterity.mixtures.covariance import Covariance, Sweep
from posterity.mixtures.full import inverse_roots, matrix_sweep, moved
from posterity.mixtures.rows import Components, Statistics


@dataclass(frozen=True)
class Tied(Covariance):
    """All components share a covariance matrix; storage (D, D).

    >>> Tied().shape(3, 2), Tied().num_parameters(3, 2)
    ((2, 2), 3)
    """

    name: ClassVar[str] = "tied"

    def shape(self, components: int, dimensions: int) -> tuple[int, ...]:
        """(D, D)."""
        return dimensions, dimensions

    def num_parameters(self, components: int, dimensions: int) -> int:
        """D (D + 1) / 2."""
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
        """The same matrix for each component (R, K, D, D)."""
        return covariances[:, None].expand(-1, components, -1, -1)

    def sweep(self, components: Components, num_data: int) -> Sweep:
        """As with a matrix for each component."""
        factors = components.factors[:, None].expand(-1, components.means.shape[1], -1, -1)
        return matrix_sweep(components._replace(factors=factors), num_data)

    def stored(self, scatters: Tensor) -> Tensor:
        """Added over components."""
        return scatters.sum(1)
