"""What a kind of covariance must say: its storage, its whitening, and the sums that a pass takes for it."""

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor

from posterity.mixtures.rows import Components, Statistics


class Sweep(ABC):
    """What a pass does with one chunk of rows after another, for M = R K components, in float64."""

    rows: int  # at most that many at a time

    @abstractmethod
    def scores(self, points: Tensor, centre: Tensor) -> Tensor:
        """The scores (M, n) of points (n, D) less the centre (D,); the caller may write over them."""

    @abstractmethod
    def add(self, weights: Tensor) -> None:
        """Add the moments of the points last given, with these weights (M, n)."""

    @abstractmethod
    def sums(self, counts: Tensor) -> tuple[Tensor, Tensor]:
        """What was added: sum w (x - mean) (R, K, D), and sum w (x - mean)(x - mean)^T (R, K, D, D) or its
        diagonal (R, K, D). Takes the sums of the weights (R, K).
        """


class Covariance(ABC):
    """A kind of covariance of K components in D dimensions; all tensors have a leading axis of R restarts."""

    name: ClassVar[str]

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
