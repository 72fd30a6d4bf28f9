"""A covariance matrix for each component."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from posterity.errors import NotPositiveDefinite
from posterity.mixtures.covariance import Covariance, Whitener
from posterity.mixtures.rows import Components, Statistics


@dataclass(frozen=True)
class Full(Covariance):
    """Each component has a covariance matrix of its own; storage (K, D, D).

    >>> Full().shape(3, 2), Full().num_parameters(3, 2)
    ((3, 2, 2), 9)
    """

    name: ClassVar[str] = "full"

    def shape(self, components: int, dimensions: int) -> tuple[int, ...]:
        """(K, D, D)."""
        return components, dimensions, dimensions

    def num_parameters(self, components: int, dimensions: int) -> int:
        """K D (D + 1) / 2."""
        return components * dimensions * (dimensions + 1) // 2

    def factors(self, covariances: Tensor) -> Tensor:
        """The inverse of the Cholesky factor, transposed: upper triangular (R, K, D, D)."""
        return inverse_roots(covariances)

    def half_log_det(self, factors: Tensor, components: int, dimensions: int) -> Tensor:
        """The sum of the logarithms of the diagonal (R, K)."""
        return factors.diagonal(dim1=-2, dim2=-1).log().sum(-1)

    def second_moments(self, statistics: Statistics) -> Tensor:
        """The scatters less counts shift shift^T (R, K, D, D)."""
        return statistics.scatters - moved(statistics)

    def dense(self, covariances: Tensor, components: int, dimensions: int) -> Tensor:
        """The covariances as they are."""
        return covariances

    def whitener(self, components: Components, like: Tensor, rows: int) -> Whitener:
        """Products with the factors of all components at once."""
        return MatrixWhitener(components.means, components.factors, like, rows)

    def row_numbers(self, components: int, dimensions: int) -> int:
        """Whitened rows, and the same once more."""
        return 2 * components * dimensions


class MatrixWhitener(Whitener):
    """Whitened coordinates by one product for all components, and moments in those coordinates.

    Distances from a mean are small numbers there, so that neither a far centre nor components far apart cancel digits.
    Rows are the last axis everywhere: additions over components and dimensions then run along contiguous memory.
    """

    def __init__(self, means: Tensor, factors: Tensor, like: Tensor, rows: int) -> None:
        self.factors = factors  # (R, K, D, D)
        self.shape = means.shape
        restarts, components, dimensions = means.shape
        count = restarts * components
        whitening = factors.mT.reshape(count * dimensions, dimensions)
        bias = (means[..., None, :] @ factors).reshape(count * dimensions, 1)
        self.whitening, self.bias = whitening.to(like.dtype), bias.neg().to(like.dtype)
        self.whitened = like.new_empty(count * dimensions * rows)
        self.products = like.new_empty(count * dimensions * rows)
        self.first = torch.zeros(count, dimensions, dtype=torch.float64, device=like.device)
        self.second = torch.zeros(count, dimensions, dimensions, dtype=torch.float64, device=like.device)

    def half_squares(self, points: Tensor) -> Tensor:
        """One product (M D, D) (D, n), then squares added over the dimensions."""
        count, dimensions = self.first.shape
        size = points.shape[1]
        used = count * dimensions * size
        self.z = self.whitened[:used].view(count * dimensions, size)
        torch.addmm(self.bias, self.whitening, points, out=self.z)
        self.z = self.z.view(count, dimensions, size)
        self.scaled = self.products[:used].view(count, dimensions, size)
        torch.mul(self.z, self.z, out=self.scaled)
        return self.scaled.sum(1).mul_(0.5)

    def add(self, weights: Tensor) -> None:
        """Products of the whitened rows with themselves, weighted, by component."""
        torch.mul(self.z, weights[:, None], out=self.scaled)
        self.first += self.scaled.sum(2)
        self.second += torch.bmm(self.scaled, self.z.mT)

    def sums(self) -> tuple[Tensor, Tensor]:
        """The moments taken back by A^-1."""
        first = self.first.view(self.shape)
        second = self.second.view(*self.shape, self.shape[-1])
        first = torch.linalg.solve_triangular(self.factors, first[..., None, :], upper=True, left=False)[..., 0, :]
        second = torch.linalg.solve_triangular(self.factors, second, upper=True, left=False)
        second = torch.linalg.solve_triangular(self.factors, second.mT, upper=True, left=False)
        return first, (second + second.mT) / 2


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
