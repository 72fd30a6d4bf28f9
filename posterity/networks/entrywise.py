"""Layers that act on each number by itself and that torch does not have."""

import torch
from torch import Tensor, nn


class Erf(nn.Module):
    """The error function as an activation: odd, bounded, with Gaussian expectations in closed form.

    >>> Erf()(torch.tensor([0.0, 1.0]))
    tensor([0.0000, 0.8427])
    """

    def forward(self, x: Tensor) -> Tensor:
        """erf(x)."""
        return torch.erf(x)


class Scaled(nn.Module):
    """Multiplication by a fixed `factor`.

    >>> Scaled(0.5)(torch.tensor([3.0]))
    tensor([1.5000])
    """

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        """factor x."""
        return self.factor * x

    def extra_repr(self) -> str:
        """The factor."""
        return f"factor={self.factor}"
