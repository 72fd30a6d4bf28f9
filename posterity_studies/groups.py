"""Fits of a study that step together, as members, in groups for which there is memory; one result file a fit."""

import hashlib
import json
import math
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from posterity.errors import Diverged
from posterity.inference import Trace
from posterity.inference.task import Identity, Result, read_result, write_result
from posterity.model.batch import Data
from posterity.model.data import OwnOrders, Reordered, TensorData
from posterity.numerics.random import Key
from posterity.posteriors import Posterior
from posterity.storage.disk import write_file

SECONDS = 300.0  # between checkpoints, which of many large networks are gigabytes


class Cell(Protocol):
    """One fit: a frozen dataclass of words and numbers, which prints as a few words."""

    def path(self, folder: Path) -> Path:
        """Its file in the folder of the study."""
        ...


C = TypeVar("C", bound=Cell)


class GroupedRuns(ABC, Generic[C]):
    """The fits of a part of a study, stored or to be made.

    Each cell has a file with its scores and all that they depend on, so that a study goes on where it stopped; a group
    that was interrupted goes on from its checkpoint.
    """

    folder: Path
    report: Callable[[str], None]

    @property
    @abstractmethod
    def name(self) -> str:
        """Of the part: its folder among the checkpoints."""

    @property
    @abstractmethod
    def prefix(self) -> str:
        """What a line about the part begins with."""

    @abstractmethod
    def identity(self, cell: C) -> Identity:
        """All that the numbers of a cell depend on."""

    @abstractmethod
    def room(self, cells: Sequence[C]) -> bool:
        """Whether there is memory for these fits at once."""

    @abstractmethod
    def infer(self, group: Sequence[C], place: Path) -> tuple[Posterior, Trace]:
        """The posteriors of the cells, as members where there are several, and the trace; resumed if `place` has it."""

    @abstractmethod
    def scores(self, cell: C, posterior: Posterior) -> dict[str, float]:
        """How the fit of a cell does; Diverged where that cannot be told, as its outputs are not finite."""

    @abstractmethod
    def told(self, scores: dict[str, float]) -> str:
        """The scores that a line about a fit has."""

    def results(self, cells: Sequence[C], most: int | None = None) -> tuple[list[Result[C]], list[C]]:
        """Of all cells, those there already and the others fitted; and the cells whose fits diverged."""
        found = self.there(cells)
        failed: list[C] = []
        for group in self.groups(cells, [cell for cell in cells if cell not in found], most):
            for cell, one in self.fitted(group):
                if one is None:
                    failed.append(cell)
                else:
                    found[cell] = one
        self.tidied()
        return [found[cell] for cell in cells if cell in found], failed

    def there(self, cells: Sequence[C]) -> dict[C, Result[C]]:
        """The results that are there already."""
        found = {cell: one for cell in cells if (one := self.stored(cell)) is not None}
        if found:
            self.report(f"{self.prefix}{len(found)} of {len(cells)} fits are there already")
        return found

    def stored(self, cell: C) -> Result[C] | None:
        """The result of the cell if it is there; BadFolder if it is damaged or of other settings."""
        path = cell.path(self.folder)
        return Result(cell, *read_result(path, self.identity(cell))) if path.exists() else None

    def groups(self, cells: Sequence[C], missing: Sequence[C], most: int | None = None) -> Iterator[list[C]]:
        """Those of `cells` that step together, until all the `missing` are there: groups begun earlier, then parts.

        A part has at most `most` cells, and no more than memory has room for.
        """
        left = list(missing)
        for begun in self._begun(cells, missing):
            left = [cell for cell in left if cell not in begun]
            self.report(f"{self.prefix}takes up {len(begun)} fits that were interrupted")
            yield begun
        if not left:
            return
        size = self._size(left, len(left) if most is None else min(most, len(left)))
        for low in range(0, len(left), size):
            yield left[low : low + size]

    def fitted(self, group: Sequence[C]) -> Iterator[tuple[C, Result[C] | None]]:
        """Fit a group and store the scores of those that are not there yet; None for a fit that has none.

        A group that diverges, or for which there is no room after all, is fitted in halves.
        """
        place = self._checkpoints / self._digest(group)
        done, why = None, ""
        write_file(place / "cells.json", json.dumps([asdict(cell) for cell in group]).encode())  # type: ignore[call-overload]
        try:
            done = self.infer(group, place / "run")
        except (Diverged, torch.OutOfMemoryError) as error:
            if len(group) == 1 and not isinstance(error, Diverged):
                raise
            why = str(error).splitlines()[0]
        if done is None:  # the error is gone, and with it what it held of memory
            shutil.rmtree(place, ignore_errors=True)
            yield from self._in_halves(group, why)
            return
        posterior, seconds = done[0], done[1].seconds / len(group)  # those before an interruption count
        for index, cell in enumerate(group):
            one = self.stored(cell)
            if one is None:
                one = self._scored(cell, posterior if len(group) == 1 else posterior.member(index), seconds)
            yield cell, one
        shutil.rmtree(place, ignore_errors=True)

    def _scored(self, cell: C, posterior: Posterior, seconds: float) -> Result[C] | None:
        """The scores of a fit, stored; None, and why, where its weights are finite and what they give is not."""
        try:
            found = self.scores(cell, posterior)
        except Diverged as error:
            self.report(f"{cell}: no result. {error}")
            return None
        bad = [name for name, value in found.items() if not math.isfinite(value)]
        if bad:
            self.report(f"{cell}: no result. Its {bad[0]} is {found[bad[0]]}.")
            return None
        write_result(cell.path(self.folder), self.identity(cell), found, seconds)
        self.report(f"{cell}: {self.told(found)}, {seconds:.1f} s")
        return Result(cell, found, seconds)

    def tidied(self) -> None:
        """Remove what is left of checkpoints."""
        shutil.rmtree(self._checkpoints, ignore_errors=True)
        with suppress(OSError):  # checkpoints of other parts
            self._checkpoints.parent.rmdir()

    def _size(self, cells: Sequence[C], most: int) -> int:
        """How many fits step together: as many as memory has room for, halving from `most`."""
        size = most
        while size > 1 and not self.room(cells[:size]):
            size = (size + 1) // 2
        if size < most:
            self.report(f"{self.prefix}{len(cells)} fits run in groups of {size}: memory has no room for more at once")
        return size

    def _in_halves(self, group: Sequence[C], why: str) -> Iterator[tuple[C, Result[C] | None]]:
        """The fits of a group that failed, half of them at a time; a single one has no result."""
        if len(group) == 1:
            self.report(f"{group[0]}: no result. {why}")
            yield group[0], None
            return
        self.report(f"{self.prefix}{len(group)} fits go in halves, because together they failed: {why}")
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        half = (len(group) + 1) // 2
        yield from self.fitted(group[:half])
        yield from self.fitted(group[half:])

    def _begun(self, cells: Sequence[C], missing: Sequence[C]) -> Iterator[list[C]]:
        """Groups with a checkpoint of these settings and a cell that is missing; other checkpoints are of no use."""
        known = {json.dumps(asdict(cell), sort_keys=True): cell for cell in cells}  # type: ignore[call-overload]
        for place in sorted(self._checkpoints.glob("*")):
            try:
                kept = json.loads((place / "cells.json").read_bytes())
                group = [known[json.dumps(one, sort_keys=True)] for one in kept]
            except (OSError, ValueError, TypeError, KeyError):
                group = []
            if self._digest(group) == place.name and any(cell in missing for cell in group):
                yield group
            else:
                shutil.rmtree(place, ignore_errors=True)

    def _digest(self, group: Sequence[C]) -> str:
        """A name for the fits of a group, with all that they depend on."""
        text = json.dumps([self.identity(cell) for cell in group], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def _checkpoints(self) -> Path:
        return self.folder / "checkpoints" / self.name


def own_orders(rows: TensorData, seeds: Sequence[int]) -> Data:
    """The rows in an order of each seed's own, and changed by its own draws; with members where there are several."""
    if len(seeds) == 1:
        return Reordered(rows, _order(seeds[0]))
    return OwnOrders(rows, lambda key: [key.fold(_order(seed)) for seed in seeds])


def first_weights(fresh: Callable[[Key], Tensor], seeds: Sequence[int], key: Key) -> Tensor:
    """What `fresh` draws for each seed by its own key, (P,) for one or a row for each."""
    each = {seed: fresh(key.fold(seed)) for seed in dict.fromkeys(seeds)}
    return each[seeds[0]] if len(seeds) == 1 else torch.stack([each[seed] for seed in seeds])


def _order(seed: int) -> str:
    return f"seed {seed}"
