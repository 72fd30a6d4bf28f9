"""Schedules of step sizes and weights: constant, cosine, warm-up, steps, cycles."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from posterity.errors import fraction, positive_whole, shown


class Schedule(ABC):
    """A factor for the step size, or for a term, at each step."""

    spreads: ClassVar[bool] = True
    """Whether the factor of a step depends on the number of all steps: a longer run then differs from its start on."""

    @abstractmethod
    def factor(self, step: int | Tensor, steps: int) -> float | Tensor:
        """The factor at `step` (from 0) of a run of `steps`: a tensor () for a tensor, whose value is never read."""


def _at_most_one(value: float | Tensor) -> float | Tensor:
    return value.clamp_max(1.0) if isinstance(value, Tensor) else min(1.0, value)


def _half_cosine(angle: float | Tensor, final: float) -> float | Tensor:
    """From 1 at angle 0 down to `final` at pi."""
    cosine = torch.cos(angle) if isinstance(angle, Tensor) else math.cos(angle)
    return final + (1.0 - final) * 0.5 * (1.0 + cosine)


@dataclass(frozen=True)
class Constant(Schedule):
    """Always 1.

    >>> Constant().factor(5, 10)
    1.0
    """

    spreads = False

    def factor(self, step: int | Tensor, steps: int) -> float | Tensor:
        return 1.0


@dataclass(frozen=True)
class Warmup(Schedule):
    """A linear rise to 1 over the first `share` of the run, then 1.

    >>> Warmup(0.5).factor(0, 98), Warmup(0.5).factor(50, 98)
    (0.02, 1.0)
    """

    share: float = 0.1

    def __post_init__(self) -> None:
        if not 0.0 <= self.share <= 1.0:
            raise ValueError(f"Warmup.share must be between 0 and 1. Got {shown(self.share)}.")

    def factor(self, step: int | Tensor, steps: int) -> float | Tensor:
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
        rising = self.warmup * steps
        up = (step + 1) / (rising + 1)
        down = _half_cosine(math.pi * _at_most_one((step - rising) / (steps - rising)), self.final)
        if isinstance(step, Tensor):
            return torch.where(step < rising, up, down)
        return up if step < rising else down


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
        return self.decay ** sum(step >= share * steps for share in self.at)


@dataclass(frozen=True)
class Cyclic(Schedule):
    """Half a cosine from 1 down to `final`, repeated every `length` steps.

    >>> schedule = Cyclic(length=3, final=0.1)
    >>> [round(schedule.factor(step, 6), 2) for step in range(6)]
    [1.0, 0.55, 0.1, 1.0, 0.55, 0.1]
    """

    length: int
    final: float = 0.0

    spreads = False

    def __post_init__(self) -> None:
        positive_whole("Cyclic.length", self.length, "of steps")
        if not 0.0 <= self.final <= 1.0:
            raise ValueError(f"Cyclic.final must be between 0 and 1. Got {shown(self.final)}.")

    def factor(self, step: int | Tensor, steps: int) -> float | Tensor:
        return _half_cosine(math.pi * (step % self.length) / max(1, self.length - 1), self.final)


@dataclass(frozen=True)
class Cycles(Schedule):
    """Half a cosine from 1 towards `final` over each `length` steps, of which the last ones sample.

    In the first `explore` share of a cycle a sampler adds no noise and keeps nothing: large steps leave one mode and
    find another. In the rest it samples there. The factor is (1 + cos(pi t / length)) / 2 at step t of a cycle,
    for final = 0 (Zhang et al., 2020, eq. 1).

    >>> cycles = Cycles(length=4, explore=0.5)
    >>> [round(cycles.factor(step, 8), 2) for step in range(5)]
    [1.0, 0.85, 0.5, 0.15, 1.0]
    >>> [cycles.samples(step) for step in range(5)]
    [False, False, True, True, False]
    """

    length: int
    explore: float = 0.75
    final: float = 0.0

    spreads = False

    def __post_init__(self) -> None:
        positive_whole("Cycles.length", self.length, "of steps")
        fraction("Cycles.explore", self.explore)
        fraction("Cycles.final", self.final)

    @property
    def first(self) -> int:
        """The first step of a cycle that samples, from 0."""
        return int(self.explore * self.length)

    def factor(self, step: int | Tensor, steps: int) -> float | Tensor:
        # A cycle of one step more reaches `final` after this one has ended: no step is of size 0.
        return Cyclic(self.length + 1, self.final).factor(step % self.length, steps)

    def samples(self, step: int | Tensor) -> bool | Tensor:
        """Whether `step` (from 0) samples: a tensor for a tensor, whose value is never read."""
        return step % self.length >= self.first
