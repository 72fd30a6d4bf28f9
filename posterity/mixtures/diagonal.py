"""A variance for each component and dimension."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from posterity.mixtures.covariance import Covariance, Whitener
from posterity.mixtures.full import refuse
from posterity.mixtures.rows import Components, Statistics


@dataclass(frozen=True)
class Diagonal(Covariance):
    """Each component has a variance of its own in each dimension; storage (K, D), factors 1 / standard deviation.

    >>> Diagonal().shape(3, 2), Diagonal().num_parameters(3, 2)
    ((3, 2), 6)
    """

    name: ClassVar[str] = "diag"

    def shape(self, components: int, dimensions: int) -> tuple[int, ...]:
        """(K, D)."""
        return components, dimensions

    def num_parameters(self, components: int, dimensions: int) -> int:
        """K D."""
        return components * dimensions

    def factors(self, covariances: Tensor) -> Tensor:
        """1 / standard deviation (R, K, D)."""
        bad = ~(torch.isfinite(covariances) & (covariances > 0)).all(-1)
        if bool(bad.any()):
            refuse(bad)
        return covariances.rsqrt()

    def half_log_det(self, factors: Tensor, components: int, dimensions: int) -> Tensor:
        """The sum of the logarithms over dimensions (R, K)."""
        return factors.log().sum(-1)

    def second_moments(self, statistics: Statistics) -> Tensor:
        """The scatters less counts shift^2 (R, K, D)."""
        return statistics.scatters - statistics.counts[..., None] * statistics.shifts.square()

    def dense(self, covariances: Tensor, components: int, dimensions: int) -> Tensor:
        """Diagonal matrices (R, K, D, D)."""
        return torch.diag_embed(covariances)

    def whitener(self, components: Components, like: Tensor, rows: int) -> Whitener:
        """Whitened coordinates one by one."""
        return ScaleWhitener(components.means, components.factors, like, rows)

    def row_numbers(self, components: int, dimensions: int) -> int:
        """Whitened rows and their squares."""
        return 2 * components * dimensions


class ScaleWhitener(Whitener):
    """Distances from the means over the scales, their squares, and the weighted sums of both."""

    def __init__(self, means: Tensor, factors: Tensor, like: Tensor, rows: int) -> None:
        self.factors = factors  # (R, K, D)
        self.shape = means.shape
        count, dimensions = means.shape[0] * means.shape[1], means.shape[2]
        self.means = means.reshape(count, dimensions, 1).to(like.dtype)
        self.scales = factors.reshape(count, dimensions, 1).to(like.dtype)
        self.whitened = like.new_empty(count * dimensions * rows)
        self.products = like.new_empty(count * dimensions * rows)
        self.first = torch.zeros(count, dimensions, dtype=torch.float64, device=like.device)
        self.second = torch.zeros(count, dimensions, dtype=torch.float64, device=like.device)

    def half_squares(self, points: Tensor) -> Tensor:
        """Squares of whitened coordinates, added over the dimensions."""
        count, dimensions = self.first.shape
        size = points.shape[1]
        used = count * dimensions * size
        self.z = self.whitened[:used].view(count, dimensions, size)
        self.squares = self.products[:used].view(count, dimensions, size)
        torch.sub(points, self.means, out=self.z)
        self.z *= self.scales
        torch.mul(self.z, self.z, out=self.squares)
        return self.squares.sum(1).mul_(0.5)

    def add(self, weights: Tensor) -> None:
        """Whitened coordinates and their squares, weighted."""
        column = weights[:, :, None]
        self.first += torch.bmm(self.z, column)[..., 0]
        self.second += torch.bmm(self.squares, column)[..., 0]

    def sums(self) -> tuple[Tensor, Tensor]:
        """The moments taken back by the scales."""
        return self.first.view(self.shape) / self.factors, self.second.view(self.shape) / self.factors.square()
