"""Step sizes, and weights of terms, over a run: factors between 0 and 1 as functions of the step."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from posterity.errors import fraction, shown


class Schedule(ABC):
    """A factor for the step size, or for a term, at each step."""

    @abstractmethod
    def factor(self, step: int | Tensor, steps: int) -> float | Tensor:
        """The factor at `step` (from 0) of a run of `steps`.

        A step that is a tensor () gives one, made without reading it: by torch's operations, and no `if`.
        """


@dataclass(frozen=True)
class Constant(Schedule):
    """Always 1.

    >>> Constant().factor(5, 10)
    1.0
    """

    def factor(self, step: int | Tensor, steps: int) -> float | Tensor:
        """1."""
        return 1.0


@dataclass(frozen=True)
class Warmup(Schedule):
    """A line up to 1 over the first `share` of the run, then 1.

    >>> Warmup(0.5).factor(0, 98), Warmup(0.5).factor(50, 98)
    (0.02, 1.0)
    """

    share: float = 0.1

    def __post_init__(self) -> None:
        if not 0.0 <= self.share <= 1.0:
            raise ValueError(f"Warmup.share must be between 0 and 1. Got {shown(self.share)}.")

    def factor(self, step: int | Tensor, steps: int) -> float | Tensor:
        """See the class."""
        return _at_most_one((step + 1) / (self.share * steps + 1))


@dataclass(frozen=True)
class Cosine(Schedule):
    """A linear warm-up over the first `warmup` share of the run, then half a cosine down to `final`.

    >>> Cosine().factor(0, 100), round(Cosine().factor(50, 100), 3), round(Cosine().factor(100, 100), 3)
    (1.0, 0.5, 0.0)
    """

    warmup: float = 0.0
    final: float = 0.0

    def __post_init__(self) -> None:
        fraction("Cosine.warmup", self.warmup)
        fraction("Cosine.final", self.final)

    def factor(self, step: int | Tensor, steps: int) -> float | Tensor:
        """See the class."""
        rising = self.warmup * steps
        up = (step + 1) / (rising + 1)
        turn = math.pi * _at_most_one((step - rising) / (steps - rising))  # the warm-up is less than the whole
        if isinstance(step, Tensor):
            return torch.where(step < rising, up, self._falling(torch.cos(torch.as_tensor(turn))))
        return up if step < rising else self._falling(math.cos(turn))

    def _falling(self, cosine: float | Tensor) -> float | Tensor:
        return self.final + (1.0 - self.final) * 0.5 * (1.0 + cosine)


@dataclass(frozen=True)
class Steps(Schedule):
    """1, multiplied by `decay` at each of the `at` shares of the run.

    >>> Steps(at=(0.5, 0.75), decay=0.1).factor(80, 100)
    0.010000000000000002
    """

    at: tuple[float, ...] = (0.5, 0.75)
    decay: float = 0.1

    def __post_init__(self) -> None:
        if not all(0.0 < share < 1.0 for share in self.at):
            raise ValueError(f"Steps.at must be shares of the run between 0 and 1. Got {shown(self.at)}.")
        if not 0.0 < self.decay <= 1.0:
            raise ValueError(f"Steps.decay must be above 0 and at most 1. Got {shown(self.decay)}.")

    def factor(self, step: int | Tensor, steps: int) -> float | Tensor:
        """See the class."""
        passed = sum(step >= share * steps for share in self.at)
        return self.decay**passed


def _at_most_one(value: float | Tensor) -> float | Tensor:
    return value.clamp_max(1.0) if isinstance(value, Tensor) else min(1.0, value)
