"""Spherical covariances."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from posterity.mixtures.covariance import Covariance
from posterity.mixtures.full import refuse
from posterity.mixtures.precisions import Precisions, raised
from posterity.mixtures.sweeps import Components, Statistics, Sweep, scale_sweep


@dataclass(frozen=True)
class Spherical(Covariance):
    """Each component has one variance for all dimensions; storage (K,), factors 1 / standard deviation.

    Its scatters and second moments are traces: a variance is the second moment over D times the count.

    >>> Spherical().shape(3, 2), Spherical().num_parameters(3, 2)
    ((3,), 3)
    """

    name: ClassVar[str] = "spherical"
    matrices: ClassVar[bool] = False

    def shape(self, components: int, dimensions: int) -> tuple[int, ...]:
        return (components,)

    def num_parameters(self, components: int, dimensions: int) -> int:
        return components

    def factors(self, covariances: Tensor) -> Tensor:
        bad = ~(torch.isfinite(covariances) & (covariances > 0))
        if bool(bad.any()):
            refuse(bad)
        return covariances.rsqrt()

    def half_log_det(self, factors: Tensor, components: int, dimensions: int) -> Tensor:
        return dimensions * factors.log()

    def second_moments(self, statistics: Statistics) -> Tensor:
        """The traces of the scatters less counts |shift|^2 (R, K)."""
        return statistics.scatters - statistics.counts * statistics.shifts.square().sum(-1)

    def dense(self, covariances: Tensor, components: int, dimensions: int) -> Tensor:
        return torch.diag_embed(covariances[..., None].expand(-1, -1, dimensions))

    def sweep(self, components: Components, num_data: int) -> Sweep:
        factors = components.factors[..., None].expand_as(components.means)
        return scale_sweep(components._replace(factors=factors), num_data)

    def stored(self, scatters: Tensor) -> Tensor:
        return scatters.sum(-1)

    def divisors(self, counts: Tensor, dimensions: int, added: float = 0.0) -> Tensor:
        """By D counts each: the second moment is a trace, of D variances that are one."""
        return dimensions * (counts + added)

    def marked(self, chosen: Tensor) -> Tensor:
        return chosen

    def identity_moment(self, dimensions: int, like: Tensor) -> Tensor:
        return dimensions * self.identity(dimensions, like)


@dataclass(frozen=True)
class SphericalPrecisions(Precisions):
    """Lambda_k = lambda_k I, lambda_k ~ Gamma(nu_k / 2, rate = W_k^-1 / 2), storage (R, K)."""

    covariance: ClassVar[Covariance] = Spherical()

    def block(self, dimensions: int) -> tuple[int, int]:
        return 1, 1

    def multiplicity(self, dimensions: int) -> int:
        return dimensions

    def prior_shape(self, dimensions: int) -> tuple[int, ...]:
        return ()

    def stored(self, matrix: Tensor) -> Tensor:
        return matrix.diagonal().mean()[None, None]

    def floored(self, stored: Tensor, floor: float) -> Tensor:
        return raised(stored, floor)

    def condition(self, stored: Tensor) -> float:
        return 1.0

    def gained_degrees(self, counts: Tensor, dimensions: int) -> Tensor:
        return dimensions * counts

    def outer(self, weights: Tensor, vectors: Tensor) -> Tensor:
        return weights * vectors.square().sum(-1)

    def broadcast(self, degrees: Tensor) -> Tensor:
        return degrees

    def log_det(self, factors: Tensor) -> Tensor:
        return 2 * factors.log()

    def trace(self, factors: Tensor, moments: Tensor) -> Tensor:
        return factors.square() * moments

    def squares(self, points: Tensor, means: Tensor, factors: Tensor) -> Tensor:
        return ((points[:, None] - means) * factors[:, None]).square().sum(-1, keepdim=True)
