"""Which part of a curvature matrix is kept."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from posterity.curvature import Curvature
from posterity.inference.method import Target
from posterity.model.data import Batch
from posterity.model.network import Buffers
from posterity.numerics.dense import Dense
from posterity.numerics.diagonal import Diagonal as DiagonalPrecision
from posterity.numerics.precision import Precision


class Structure(ABC):
    """How the curvature over R weights is held while it is summed, and the precision made of it."""

    @abstractmethod
    def shape(self, size: int) -> tuple[int, ...]:
        """Shape of the sum for `size` weights."""

    @abstractmethod
    def of(
        self, curvature: Curvature, joint: Target, theta: Tensor, batch: Batch | None, buffers: Buffers | None
    ) -> Tensor:
        """The part of the curvature of these rows that is kept."""

    @abstractmethod
    def tempered(self, total: Tensor, power: float | Tensor) -> Tensor:
        """The sum times the likelihood's power, a number or one for each member."""

    @abstractmethod
    def with_diagonal(self, total: Tensor, diagonal: Tensor) -> Tensor:
        """The sum plus a diagonal matrix given as (..., R)."""

    @abstractmethod
    def precision(self, total: Tensor) -> Precision:
        """The precision matrix of the sum."""


@dataclass(frozen=True)
class Full(Structure):
    """The whole matrix, R x R.

    >>> Full().shape(3)
    (3, 3)
    """

    def shape(self, size: int) -> tuple[int, ...]:
        """(R, R)."""
        return (size, size)

    def of(
        self, curvature: Curvature, joint: Target, theta: Tensor, batch: Batch | None, buffers: Buffers | None
    ) -> Tensor:
        """The dense matrix."""
        return curvature.matrix(joint, theta, batch, buffers)

    def tempered(self, total: Tensor, power: float | Tensor) -> Tensor:
        """Times the power."""
        return total * (power.to(total)[:, None, None] if isinstance(power, Tensor) else power)

    def with_diagonal(self, total: Tensor, diagonal: Tensor) -> Tensor:
        """Plus the diagonal."""
        return total + torch.diag_embed(diagonal)

    def precision(self, total: Tensor) -> Precision:
        """Dense, factored."""
        return Dense(total)


@dataclass(frozen=True)
class Diagonal(Structure):
    """The diagonal alone: weights independent.

    >>> Diagonal().shape(3)
    (3,)
    """

    def shape(self, size: int) -> tuple[int, ...]:
        """(R,)."""
        return (size,)

    def of(
        self, curvature: Curvature, joint: Target, theta: Tensor, batch: Batch | None, buffers: Buffers | None
    ) -> Tensor:
        """The diagonal."""
        return curvature.diagonal(joint, theta, batch, buffers)

    def tempered(self, total: Tensor, power: float | Tensor) -> Tensor:
        """Times the power."""
        return total * (power.to(total)[:, None] if isinstance(power, Tensor) else power)

    def with_diagonal(self, total: Tensor, diagonal: Tensor) -> Tensor:
        """Plus the diagonal."""
        return total + diagonal

    def precision(self, total: Tensor) -> Precision:
        """Diagonal."""
        return DiagonalPrecision(total)
