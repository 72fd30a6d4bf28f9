"""Symmetric positive definite matrices given as precisions: what a Gaussian over weights needs of them."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from posterity.numerics.jacobian import Jacobian
from posterity.numerics.random import Key


class Precision(ABC):
    """A precision matrix Lambda = C + diag(prior) (..., R, R), possibly one for each member, in float64.

    C is the curvature of the data in some structure, `prior` (..., R) the diagonal of the prior. With Sigma =
    Lambda^-1. Implementations differ in structure only; every one is tested against the dense one.
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
    def rescaled(self, scale: Tensor | float, prior: Tensor) -> "Precision":
        """scale C + diag(prior): the same curvature times a number, with another prior (R,).

        Its `logdet` is differentiable in both.
        """

    @abstractmethod
    def diagonal(self) -> Tensor:
        """Diagonal of Lambda, (..., R)."""

    @abstractmethod
    def matvec(self, vector: Tensor) -> Tensor:
        """Lambda v for v (..., R)."""

    @abstractmethod
    def solve(self, vector: Tensor) -> Tensor:
        """Sigma v for v (..., R)."""

    @abstractmethod
    def colour(self, noise: Tensor) -> Tensor:
        """Draws of N(0, Sigma), (..., S, R), from standard normal noise (..., S, R)."""

    def draws(self, count: int, key: Key, like: Tensor, space: Tensor | None = None) -> Tensor:
        """Fresh draws (count, R) of N(0, Sigma), on the device and in the number type of `like`; of one member.

        They may be made in `space`, float32 (count, R), if given.
        """
        return self.colour(key.normal((count, self.size), torch.float64, like.device)).to(like.dtype)

    @abstractmethod
    def variance(self) -> Tensor:
        """Diagonal of Sigma, (..., R)."""

    @abstractmethod
    def quadratic(self, jacobian: Tensor | Jacobian) -> Tensor:
        """J Sigma J^T for each row, (..., N, D, D), of J (N, D, R)."""

    def marginal(self, jacobian: Tensor | Jacobian) -> Tensor:
        """Diagonals of `quadratic`, (..., N, D)."""
        return self.quadratic(jacobian).diagonal(dim1=-2, dim2=-1)

    @abstractmethod
    def joint_quadratic(self, jacobian: Tensor | Jacobian) -> Tensor:
        """J Sigma J^T between all rows, (..., N D, N D), of J (N, D, R)."""

    @abstractmethod
    def covariance(self) -> Tensor:
        """Sigma as a dense matrix (..., R, R)."""

    @abstractmethod
    def member(self, index: int) -> "Precision":
        """The matrix of one member."""
