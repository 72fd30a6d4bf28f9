"""Kinds of covariance of the components of a mixture."""

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from posterity.mixtures.sweeps import Components, Statistics, Sweep


class Covariance(ABC):
    """A kind of covariance of K components in D dimensions; all tensors have a leading axis of R restarts."""

    name: ClassVar[str]
    matrices: ClassVar[bool]  # whether covariances and factors are kept as matrices (..., D, D), else as numbers

    @abstractmethod
    def shape(self, components: int, dimensions: int) -> tuple[int, ...]:
        """The shape in which covariances and factors are kept."""

    @abstractmethod
    def num_parameters(self, components: int, dimensions: int) -> int:
        """The number of free parameters."""

    @abstractmethod
    def factors(self, covariances: Tensor) -> Tensor:
        """The whitening A (R, *shape): (x - mean_k) A_k has unit covariance.

        Raises `NotPositiveDefinite`, naming the component, where there is none.
        """

    @abstractmethod
    def half_log_det(self, factors: Tensor, components: int, dimensions: int) -> Tensor:
        """log det A_k (R, K), which is minus half the log determinant of the covariance."""

    @abstractmethod
    def second_moments(self, statistics: Statistics) -> Tensor:
        """sum_n w_n r_nk (x_n - m_k)(x_n - m_k)^T about the new means m (R, *shape), in this kind's storage."""

    @abstractmethod
    def dense(self, covariances: Tensor, components: int, dimensions: int) -> Tensor:
        """The covariances as matrices (R, K, D, D)."""

    @abstractmethod
    def sweep(self, components: Components, num_data: int) -> Sweep:
        """What goes over so many rows, chunk by chunk."""

    @abstractmethod
    def stored(self, scatters: Tensor) -> Tensor:
        """The scatters that the sweep has found, in this kind's storage (R, *shape)."""

    @abstractmethod
    def divisors(self, counts: Tensor, dimensions: int, added: float = 0.0) -> Tensor:
        """What second moments (R, *shape) are divided by to be covariances: counts (R, K), with `added` to each one."""

    @abstractmethod
    def marked(self, chosen: Tensor) -> Tensor:
        """A mark on components (R, K) as one on covariances (R, *shape); one that is shared is never marked."""

    def log_determinants(self, factors: Tensor, components: int, dimensions: int) -> Tensor:
        """The sum of log det S over the covariances that there are, (R,)."""
        return -2 * self.half_log_det(factors, components, dimensions).sum(-1)

    def identity(self, dimensions: int, like: Tensor) -> Tensor:
        """The unit covariance, to be added to covariances (R, *shape)."""
        unit = torch.ones((), dtype=like.dtype, device=like.device)
        return torch.eye(dimensions, dtype=like.dtype, device=like.device) if self.matrices else unit

    def identity_moment(self, dimensions: int, like: Tensor) -> Tensor:
        """The second moment of unit covariance and count 1, to be added to second moments (R, *shape)."""
        return self.identity(dimensions, like)

    def precisions(self, factors: Tensor) -> Tensor:
        """The inverse covariances (R, *shape) of whitening factors."""
        return factors @ factors.mT if self.matrices else factors.square()

    def quadratic(self, factors: Tensor, moments: Tensor) -> Tensor:
        """The sum over covariances of tr(S^-1 M), (R,), from factors and second moments (R, *shape)."""
        # For matrices by A^T M A: the inverse of a narrow covariance would cancel digits.
        products = factors * (moments @ factors) if self.matrices else factors.square() * moments
        return products.flatten(1).sum(-1)
