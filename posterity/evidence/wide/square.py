"""The square loss."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from posterity.errors import positive, shown
from posterity.evidence.wide.loss import Loss
from posterity.evidence.wide.output_law import OutputLaw


@dataclass(frozen=True)
class Square(Loss):
    """l = precision/2 |y - f|^2: Gaussian noise of variance 1 / precision. The default is |y - f|^2, variance 1/2.

    **Math**: E l = precision/2 (|y - E f|^2 + tr Cov f), exactly.

    >>> Square().value(torch.zeros(1, 1), torch.tensor([[3.0]]))
    tensor([9.])
    """

    precision: float = 2.0

    def __post_init__(self) -> None:
        positive("Square.precision", self.precision)

    @property
    def smoothness(self) -> float:
        """The precision."""
        return self.precision

    def checked(self, targets: Tensor, outputs: int) -> Tensor:
        """Targets (P, C), or (P,) for one output."""
        rows = targets.unsqueeze(-1) if targets.dim() == 1 else targets
        if rows.dim() != 2 or rows.shape[-1] != outputs:
            raise ValueError(f"Square: targets must be (P, {outputs}). Got {shown(targets)}.")
        return rows.to(torch.float64)

    def value(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """precision/2 |y - f|^2."""
        return 0.5 * self.precision * (targets - outputs).square().sum(-1)

    def slope(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """precision (f - y)."""
        return self.precision * (outputs - targets)

    def curvature(self, outputs: Tensor) -> Tensor:
        """precision I."""
        return self.precision * torch.diag_embed(torch.ones_like(outputs))

    def excess(self, law: OutputLaw) -> Tensor:
        """precision/2 tr Cov f, exactly."""
        return 0.5 * self.precision * law.total_variance

    def log_normaliser(self, outputs: int) -> float:
        """C/2 log(2 pi / precision)."""
        return 0.5 * outputs * math.log(2.0 * math.pi / self.precision)
