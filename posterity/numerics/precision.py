"""Symmetric positive definite matrices given as precisions: what a Gaussian over weights needs of them."""

from abc import ABC, abstractmethod

from torch import Tensor


class Precision(ABC):
    """A precision matrix Lambda (..., R, R), possibly one for each member, in float64.

    With Sigma = Lambda^-1. Implementations differ in structure only; every one is tested against the dense one.
    """

    @property
    @abstractmethod
    def size(self) -> int:
        """R."""

    @property
    @abstractmethod
    def logdet(self) -> Tensor:
        """log det Lambda, (...)."""

    @abstractmethod
    def matvec(self, vector: Tensor) -> Tensor:
        """Lambda v for v (..., R)."""

    @abstractmethod
    def solve(self, vector: Tensor) -> Tensor:
        """Sigma v for v (..., R)."""

    @abstractmethod
    def colour(self, noise: Tensor) -> Tensor:
        """Draws of N(0, Sigma), (..., S, R), from standard normal noise (..., S, R)."""

    @abstractmethod
    def variance(self) -> Tensor:
        """Diagonal of Sigma, (..., R)."""

    @abstractmethod
    def quadratic(self, jacobian: Tensor) -> Tensor:
        """J Sigma J^T for J (N, D, R): (..., N, D, D)."""

    @abstractmethod
    def covariance(self) -> Tensor:
        """Sigma as a dense matrix (..., R, R)."""

    @abstractmethod
    def member(self, index: int) -> "Precision":
        """The matrix of one member."""
