"""How the unknown precisions of a mixture's components are distributed: Wishart matrices in the storage of a kind."""

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from posterity.mixtures.covariance import Covariance


class Precisions(ABC):
    """Wishart distributions of the precisions of one kind of covariance; given these, means are Normal.

    Tensors in the kind's storage are (R, *shape). There is one number of degrees of freedom for each component (R, K),
    or one in all (R, 1) where components share their precision. `factors` A are those of the covariances W^-1 / nu, so
    that A A^T = nu W is the expected precision.
    """

    covariance: ClassVar[Covariance]

    @abstractmethod
    def block(self, dimensions: int) -> tuple[int, int]:
        """(p, copies): a component's precision is made of so many independent Wishart matrices, each p by p."""

    @abstractmethod
    def multiplicity(self, dimensions: int) -> int:
        """How many times those matrices stand on the diagonal of the whole precision (D, D)."""

    @abstractmethod
    def prior_shape(self, dimensions: int) -> tuple[int, ...]:
        """The shape in which W^-1 of the prior, one for all components, is given."""

    @abstractmethod
    def stored(self, matrix: Tensor) -> Tensor:
        """A matrix (D, D) as the kind stores it, (1, *shape) with one component: its diagonal, or the mean of that."""

    @abstractmethod
    def floored(self, stored: Tensor, floor: float) -> Tensor:
        """A matrix in storage with its variances raised by the share `floor` (`raised`)."""

    @abstractmethod
    def condition(self, stored: Tensor) -> float:
        """The largest condition number of stored matrices, each scaled to a unit diagonal: it magnifies rounding."""

    @abstractmethod
    def gained_degrees(self, counts: Tensor, dimensions: int) -> Tensor:
        """What counts (R, K) of rows add to the degrees of freedom, (R, K) or (R, 1)."""

    @abstractmethod
    def outer(self, weights: Tensor, vectors: Tensor) -> Tensor:
        """w_k v_k v_k^T in the kind's storage, from (R, K) and (R, K, D)."""

    @abstractmethod
    def broadcast(self, degrees: Tensor) -> Tensor:
        """Degrees of freedom with the axes that they need to multiply a tensor in the kind's storage."""

    @abstractmethod
    def log_det(self, factors: Tensor) -> Tensor:
        """log|nu W| summed over the copies, (R, K) or (R, 1)."""

    @abstractmethod
    def trace(self, factors: Tensor, moments: Tensor) -> Tensor:
        """tr(nu W M) summed over the copies, for M in the kind's storage, (R, K) or (R, 1)."""

    @abstractmethod
    def squares(self, points: Tensor, means: Tensor, factors: Tensor) -> Tensor:
        """|(x_n - m_k) A_k|^2, apart for independent matrices: (N, D), (K, D), (*shape) -> (N, K, copies)."""


def raised(variances: Tensor, floor: float) -> Tensor:
    """Variances times 1 + floor; those that are 0 become the floor."""
    return torch.where(variances > 0, variances * (1 + floor), floor)


def condition_of(matrices: Tensor) -> float:
    """The largest condition number of matrices (..., D, D) scaled to a unit diagonal."""
    scales = matrices.diagonal(dim1=-2, dim2=-1).sqrt()
    values = torch.linalg.eigvalsh(matrices / (scales[..., :, None] * scales[..., None, :]))
    return float((values[..., -1] / values[..., 0].clamp(min=torch.finfo(values.dtype).tiny)).max())
