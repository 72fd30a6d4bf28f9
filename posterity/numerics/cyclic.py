"""Step sizes that fall and start anew."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from posterity.errors import positive_whole, shown
from posterity.numerics.schedules import Schedule


@dataclass(frozen=True)
class Cyclic(Schedule):
    """Half a cosine from 1 down to `final` over each `length` steps, again and again.

    >>> schedule = Cyclic(length=3, final=0.1)
    >>> [round(schedule.factor(step, 6), 2) for step in range(6)]
    [1.0, 0.55, 0.1, 1.0, 0.55, 0.1]
    """

    length: int
    final: float = 0.0

    def __post_init__(self) -> None:
        positive_whole("Cyclic.length", self.length, "of steps")
        if not 0.0 <= self.final <= 1.0:
            raise ValueError(f"Cyclic.final must be between 0 and 1. Got {shown(self.final)}.")

    def factor(self, step: int | Tensor, steps: int) -> float | Tensor:
        """See the class."""
        turn = math.pi * (step % self.length) / max(1, self.length - 1)
        cosine = torch.cos(turn) if isinstance(turn, Tensor) else math.cos(turn)
        return self.final + (1.0 - self.final) * 0.5 * (1.0 + cosine)
