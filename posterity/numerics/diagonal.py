"""Diagonal precision matrices."""

from dataclasses import dataclass

import torch
from torch import Tensor

from posterity.errors import NotPositiveDefinite
from posterity.numerics.precision import Precision


@dataclass(frozen=True, eq=False)
class Diagonal(Precision):
    """Lambda = diag(entries), entries (..., R) positive, in float64.

    >>> Diagonal(torch.tensor([4.0, 1.0])).solve(torch.ones(2))
    tensor([0.2500, 1.0000], dtype=torch.float64)
    """

    entries: Tensor

    def __post_init__(self) -> None:
        object.__setattr__(self, "entries", self.entries.to(torch.float64))
        if not bool(torch.isfinite(self.entries).all()):
            raise NotPositiveDefinite(
                "The diagonal precision has entries that are not finite. Look for NaN or infinite weights or data."
            )
        if not bool((self.entries > 0).all()):
            raise NotPositiveDefinite(
                f"The diagonal precision has entries that are not positive (smallest {float(self.entries.min()):.3g}). "
                "The weights are not at a mode: train longer, use the Gauss-Newton curvature, or a smaller prior scale."
            )

    @property
    def size(self) -> int:
        """R."""
        return self.entries.shape[-1]

    @property
    def logdet(self) -> Tensor:
        """Sum of logs."""
        return self.entries.log().sum(-1)

    def matvec(self, vector: Tensor) -> Tensor:
        """Entry times entry."""
        return self.entries * vector

    def solve(self, vector: Tensor) -> Tensor:
        """Entry over entry."""
        return vector / self.entries

    def colour(self, noise: Tensor) -> Tensor:
        """Noise over the square roots."""
        return noise / self.entries.sqrt().unsqueeze(-2)

    def variance(self) -> Tensor:
        """1 / entries."""
        return 1.0 / self.entries

    def quadratic(self, jacobian: Tensor) -> Tensor:
        """J diag(1/entries) J^T."""
        half = jacobian.to(torch.float64) / self.entries.sqrt()[..., None, None, :]
        return half @ half.transpose(-2, -1)

    def covariance(self) -> Tensor:
        """diag(1/entries)."""
        return torch.diag_embed(1.0 / self.entries)

    def member(self, index: int) -> "Diagonal":
        """One member's matrix."""
        return Diagonal(self.entries[index])
