"""Diagonal covariances."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from posterity.mixtures.covariance import Covariance
from posterity.mixtures.full import refuse
from posterity.mixtures.precisions import Precisions, raised
from posterity.mixtures.sweeps import Components, Statistics, Sweep, scale_sweep


@dataclass(frozen=True)
class Diagonal(Covariance):
    """Each component has a variance of its own in each dimension; storage (K, D), factors 1 / standard deviation.

    >>> Diagonal().shape(3, 2), Diagonal().num_parameters(3, 2)
    ((3, 2), 6)
    """

    name: ClassVar[str] = "diag"
    matrices: ClassVar[bool] = False

    def shape(self, components: int, dimensions: int) -> tuple[int, ...]:
        return components, dimensions

    def num_parameters(self, components: int, dimensions: int) -> int:
        return components * dimensions

    def factors(self, covariances: Tensor) -> Tensor:
        bad = ~(torch.isfinite(covariances) & (covariances > 0)).all(-1)
        if bool(bad.any()):
            refuse(bad)
        return covariances.rsqrt()

    def half_log_det(self, factors: Tensor, components: int, dimensions: int) -> Tensor:
        return factors.log().sum(-1)

    def second_moments(self, statistics: Statistics) -> Tensor:
        return statistics.scatters - statistics.counts[..., None] * statistics.shifts.square()

    def dense(self, covariances: Tensor, components: int, dimensions: int) -> Tensor:
        return torch.diag_embed(covariances)

    def sweep(self, components: Components, num_data: int) -> Sweep:
        """Squares of coordinates where these suffice, else whitened distances."""
        return scale_sweep(components, num_data)

    def stored(self, scatters: Tensor) -> Tensor:
        return scatters

    def divisors(self, counts: Tensor, dimensions: int, added: float = 0.0) -> Tensor:
        return (counts + added)[..., None]

    def marked(self, chosen: Tensor) -> Tensor:
        return chosen[..., None]


@dataclass(frozen=True)
class DiagonalPrecisions(Precisions):
    """lambda_kd ~ Gamma(nu_k / 2, rate = W_kd^-1 / 2), independent: Wishart at p = 1, storage (R, K, D)."""

    covariance: ClassVar[Covariance] = Diagonal()

    def block(self, dimensions: int) -> tuple[int, int]:
        return 1, dimensions

    def multiplicity(self, dimensions: int) -> int:
        return 1

    def prior_shape(self, dimensions: int) -> tuple[int, ...]:
        return (dimensions,)

    def stored(self, matrix: Tensor) -> Tensor:
        return matrix.diagonal()[None, None]

    def floored(self, stored: Tensor, floor: float) -> Tensor:
        return raised(stored, floor)

    def condition(self, stored: Tensor) -> float:
        return 1.0

    def gained_degrees(self, counts: Tensor, dimensions: int) -> Tensor:
        return counts

    def outer(self, weights: Tensor, vectors: Tensor) -> Tensor:
        return weights[..., None] * vectors.square()

    def broadcast(self, degrees: Tensor) -> Tensor:
        return degrees[..., None]

    def log_det(self, factors: Tensor) -> Tensor:
        return 2 * factors.log().sum(-1)

    def trace(self, factors: Tensor, moments: Tensor) -> Tensor:
        return (factors.square() * moments).sum(-1)

    def squares(self, points: Tensor, means: Tensor, factors: Tensor) -> Tensor:
        return ((points[:, None] - means) * factors).square()
