"""Fits that build on one another and serve several rows of a table: each runs once and resumes from its checkpoint."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from posterity.errors import PosterityError
from posterity.inference import Callback, Checkpoint, Method, infer
from posterity.inference.run import Run, Trace
from posterity.model import Joint
from posterity.numerics.random import Key
from posterity.posteriors import Mixture, Posterior
from posterity.processes import active
from posterity_studies.options import Report

STORED = 20.0  # seconds between checkpoints: so much of a fit at most is done again


class OutOfTime(PosterityError):
    """The minutes of a row are over; what its fits have done is stored."""


class Deadline(Callback):
    """Ends a run, which its checkpoint keeps, a step after the minutes of its row are over."""

    def __init__(self, minutes: float | None) -> None:
        self._until = None if minutes is None else time.monotonic() + 60.0 * minutes
        self._over = False

    def after_step(self, run: Run) -> None:
        if self._over and run.step < run.steps:
            raise OutOfTime(f"after step {run.step:,} of {run.steps:,} the time of this row was over")
        if self._until is not None:
            over, processes = time.monotonic() > self._until, active()
            self._over = over if processes is None else processes.any(over)[0]  # clocks differ by process


def first(posterior: Posterior) -> Posterior:
    """The first member of an ensemble."""
    assert isinstance(posterior, Mixture)
    return posterior.posteriors[0]


def whole(posterior: Posterior) -> Posterior:
    """All of a posterior."""
    return posterior


@dataclass(frozen=True)
class Fit:
    """A fit: its method by length and factor on the learning rate of chains; what it starts from, and where.

    `dropping` fits the network with dropout, `members` count those that step together.
    """

    method: Callable[[Any, float], Method]
    after: str | None = None
    start: Callable[[Posterior], Posterior | Tensor] = whole
    members: int = 1
    dropping: bool = False
    samples: bool = False


def names_up_to(name: str, recipes: Mapping[str, Fit]) -> tuple[str, ...]:
    """The names of the fits that a fit builds on, in order, and its own."""
    names = [name]
    while (before := recipes[names[0]].after) is not None:
        names.insert(0, before)
    return tuple(names)


@dataclass(frozen=True, eq=False)
class Fitted:
    """The posterior of a fit, its trace with its seconds, and its method."""

    posterior: Posterior
    trace: Trace
    method: Method


class Fits:
    """The fits of a call, in folders of `folder`.

    `joint` makes the problem, with dropout or without. `title` begins the lines that `report` is told. With `half`
    steps run the network in bf16 where the method can.
    """

    def __init__(
        self,
        recipes: Mapping[str, Fit],
        length: Any,
        joint: Callable[[bool], Joint],
        data: object,
        folder: Path,
        seed: int,
        title: str,
        report: Report,
        half: bool = False,
    ) -> None:
        self._recipes, self._length, self._joint, self._data = recipes, length, joint, data
        self._folder, self._seed, self._title, self._report, self._half = folder, seed, title, report, half
        self._done: dict[tuple[str, float], Fitted] = {}

    def fitted(self, name: str, rate: float = 1.0, deadline: Deadline | None = None) -> Fitted:
        """The fit of this name, after those that it starts from."""
        fit = self._recipes[name]
        rate = rate if fit.samples else 1.0
        if (name, rate) in self._done:
            return self._done[name, rate]
        before = None if fit.after is None else self.fitted(fit.after, 1.0, deadline).posterior
        method = fit.method(self._length, rate)
        posterior, trace = infer(
            method,
            self._joint(fit.dropping),
            self._data,
            start=None if before is None else fit.start(before),
            seed=Key(self._seed).fold(name).seed,
            checkpoint=Checkpoint(self._folder / f"{name}-{rate:g}", seconds=STORED),
            callbacks=[] if deadline is None else [deadline],
            progress=False,
            precision="bf16" if self._half and "bf16" in method.traits.passes else None,
        )
        self._report(f"{self._title}, fit {name}: {trace.seconds:.0f} s")
        self._done[name, rate] = Fitted(posterior, trace, method)
        return self._done[name, rate]

    def methods(self, name: str, rate: float = 1.0) -> list[Method]:
        """The methods of a fit and of those that it builds on, in order."""
        return [self._recipes[known].method(self._length, rate) for known in names_up_to(name, self._recipes)]

    def seconds(self, name: str, members: int, rate: float = 1.0, deadline: Deadline | None = None) -> float:
        """The seconds of a fit and of those that it builds on, of each the share of so many of its members."""
        return sum(
            min(1.0, members / self._recipes[known].members) * self.fitted(known, rate, deadline).trace.seconds
            for known in names_up_to(name, self._recipes)
        )
