"""Cycles of a sampler: seek, then sample."""

from dataclasses import dataclass

from torch import Tensor

from posterity.errors import fraction, positive_whole
from posterity.numerics.cyclic import Cyclic
from posterity.numerics.schedules import Schedule


@dataclass(frozen=True)
class Cycles(Schedule):
    """Half a cosine from 1 towards `final` over each `length` steps, of which the last ones sample.

    In the first `explore` share of a cycle a sampler adds no noise and keeps nothing: large steps that leave one mode
    and find another. In the rest it samples there. The factor is (1 + cos(pi t / length)) / 2 at step t of a cycle,
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

    def __post_init__(self) -> None:
        positive_whole("Cycles.length", self.length, "of steps")
        fraction("Cycles.explore", self.explore)
        fraction("Cycles.final", self.final)

    @property
    def first(self) -> int:
        """The first step of a cycle that samples, from 0."""
        return int(self.explore * self.length)

    def factor(self, step: int | Tensor, steps: int) -> float | Tensor:
        """See the class."""
        # A cycle of one step more ends at `final` just after this one has begun anew: no step is of size 0.
        return Cyclic(self.length + 1, self.final).factor(step % self.length, steps)

    def samples(self, step: int | Tensor) -> bool | Tensor:
        """Whether this step, counted from 0, samples; a tensor for a step that is one, made without reading it."""
        return step % self.length >= self.first
