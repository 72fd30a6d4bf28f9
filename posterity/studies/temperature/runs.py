"""Fits of the study: many at once, and one small file of scores for each."""

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from posterity import __version__
from posterity.errors import Diverged
from posterity.inference import Checkpoint, infer, plan
from posterity.model.data import TensorData, as_data
from posterity.model.orders import OwnOrders, Reordered
from posterity.numerics.random import Key
from posterity.posteriors import Posterior
from posterity.report.files import write_file
from posterity.studies.results import Identity, read_result, write_result
from posterity.studies.temperature.protocol import Problem, Settings
from posterity.studies.temperature.scores import scores

SECONDS = 300.0  # between checkpoints, which for wide networks are gigabytes


@dataclass(frozen=True)
class Cell:
    """One fit: a width, eta and a seed."""

    width: int | None
    eta: float
    seed: int

    def path(self, folder: Path) -> Path:
        """Its file in the folder of the study."""
        return folder / "runs" / _name(self.width) / f"eta-{self.eta:.12g}" / f"seed-{self.seed}.json"

    def __str__(self) -> str:
        width = "" if self.width is None else f"width {self.width}, "
        return f"{width}eta {self.eta:.4g}, seed {self.seed}"


@dataclass(frozen=True)
class Result:
    """What a cell gave: its scores, and its share of the seconds that its group took to fit."""

    cell: Cell
    scores: dict[str, float]
    seconds: float


@dataclass(frozen=True, eq=False)
class Runs:
    """The fits of one width: those stored, and those to be made.

    `identity` has all that the numbers of a cell depend on; the method as it prints, so that a default that has
    changed tells.
    """

    problem: Problem
    folder: Path
    settings: Settings
    report: Callable[[str], None]
    fingerprint: str

    def cells(self) -> list[Cell]:
        """All of the width, by seed and temperature."""
        etas = self.settings.temperatures(self.problem.num_data, self.problem.units)
        return [Cell(self.problem.width, eta, seed) for seed in range(self.settings.seeds) for eta in etas]

    def identity(self, cell: Cell) -> Identity:
        """All that the numbers of a cell depend on."""
        return {
            "width": cell.width,
            "eta": cell.eta,
            "fit": cell.seed,
            **self.settings.common(),
            "inference": repr(self.settings.inference(self.problem.num_data)),
            "training rows": self.fingerprint,
            "posterity": __version__,
        }

    def results(self) -> tuple[list[Result], list[Cell]]:
        """Of all cells, those there already and the others fitted; and the cells whose fits diverged."""
        cells = self.cells()
        found = {cell: one for cell in cells if (one := self.stored(cell)) is not None}
        if found:
            self.report(f"{self._width()}{len(found)} of {len(cells)} fits are there already")
        failed: list[Cell] = []
        for group in self._groups([cell for cell in cells if cell not in found]):
            for cell, one in self._fitted(group):
                if one is None:
                    failed.append(cell)
                else:
                    found[cell] = one
        shutil.rmtree(self._checkpoints(), ignore_errors=True)
        with suppress(OSError):  # checkpoints of other widths
            self._checkpoints().parent.rmdir()
        return [found[cell] for cell in cells if cell in found], failed

    def stored(self, cell: Cell) -> Result | None:
        """The result of the cell if it is there; BadFolder if it is damaged or of other settings."""
        path = cell.path(self.folder)
        return Result(cell, *read_result(path, self.identity(cell))) if path.exists() else None

    def _groups(self, missing: Sequence[Cell]) -> Iterator[list[Cell]]:
        """The cells that are fitted together: first groups that were begun and interrupted, then the rest in parts."""
        left = list(missing)
        for begun in self._begun(missing):
            left = [cell for cell in left if cell not in begun]
            self.report(f"{self._width()}takes up {len(begun)} fits that were interrupted")
            yield begun
        size = self._size(left)
        for low in range(0, len(left), max(size, 1)):
            yield left[low : low + size]

    def _size(self, cells: Sequence[Cell]) -> int:
        """How many fits step together: as many as memory has room for, halving from all of them."""
        method = self.settings.inference(self.problem.num_data)
        if not method.takes_members:
            return 1
        size = len(cells)
        while size > 1:
            joint = self.problem.tempered([cell.eta for cell in cells[:size]])
            if plan(method, joint, self.problem.rows.train.pair).fits:
                break
            size = (size + 1) // 2
        if size < len(cells):
            self.report(
                f"{self._width()}{len(cells)} fits run in groups of {size}: memory has no room for more at once"
            )
        return size

    def _fitted(self, group: Sequence[Cell]) -> Iterator[tuple[Cell, Result | None]]:
        """Fit a group and store the scores of those that are not there yet; None for a fit that diverged.

        A group that diverges, or for which there is no room after all, is fitted in halves.
        """
        begin = time.perf_counter()
        place = self._checkpoints() / self._digest(group)
        posterior, why = None, ""
        try:
            posterior = self._infer(group, place)
        except (Diverged, torch.OutOfMemoryError) as error:
            if len(group) == 1 and not isinstance(error, Diverged):
                raise
            why = str(error).splitlines()[0]
        if posterior is None:  # the error is gone, and with it what it held of memory
            shutil.rmtree(place, ignore_errors=True)
            yield from self._in_halves(group, why)
            return
        seconds = (time.perf_counter() - begin) / len(group)
        for index, cell in enumerate(group):
            one = self.stored(cell)
            if one is None:
                own = posterior if len(group) == 1 else posterior.member(index)
                found = scores(own, cell.seed, self.problem, self.settings)
                write_result(cell.path(self.folder), self.identity(cell), found, seconds)
                one = Result(cell, found, seconds)
                self.report(
                    f"{cell}: accuracy {found['accuracy']:.4f}, NLL {found['nll']:.4g}, "
                    f"confidence {found['confidence']:.3f}, {seconds:.1f} s"
                )
            yield cell, one
        shutil.rmtree(place, ignore_errors=True)

    def _in_halves(self, group: Sequence[Cell], why: str) -> Iterator[tuple[Cell, Result | None]]:
        """The fits of a group that failed, half of them at a time; a single one has no result."""
        if len(group) == 1:
            self.report(f"{group[0]}: no result. {why}")
            yield group[0], None
            return
        self.report(f"{self._width()}{len(group)} fits go in halves, because together they failed: {why}")
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        half = (len(group) + 1) // 2
        yield from self._fitted(group[:half])
        yield from self._fitted(group[half:])

    def _infer(self, group: Sequence[Cell], place: Path) -> Posterior:
        """The posteriors of the cells, as members where there are several; resumed if the folder holds the run."""
        settings, rows = self.settings, as_data(self.problem.rows.train.pair)
        assert isinstance(rows, TensorData)
        seeds, etas = [cell.seed for cell in group], [cell.eta for cell in group]
        method, key = settings.inference(self.problem.num_data), Key(settings.seed).fold("temperature")
        own: Any = Reordered(rows, _order(seeds[0])) if len(group) == 1 else OwnOrders(rows, _orders(seeds))
        count = "a fit" if len(group) == 1 else f"{len(group)} fits together"
        self.report(f"{self._width()}{count}, {len(method.batches(rows, key)):,} steps")
        write_file(place / "cells.json", json.dumps([[cell.eta, cell.seed] for cell in group]).encode())
        return infer(
            method,
            self.problem.tempered(etas),
            own,
            start=self.problem.start(seeds, key.fold("start")),
            seed=key.seed,
            checkpoint=Checkpoint(place / "run", seconds=SECONDS),
            progress=False,
        )[0]

    def _begun(self, missing: Sequence[Cell]) -> Iterator[list[Cell]]:
        """Groups with a checkpoint of these settings and a cell that is missing; other checkpoints are of no use."""
        for place in sorted(self._checkpoints().glob("*")):
            try:
                pairs = json.loads((place / "cells.json").read_bytes())
                group = [Cell(self.problem.width, float(eta), int(seed)) for eta, seed in pairs]
            except (OSError, ValueError, TypeError):
                group = []
            if self._digest(group) == place.name and any(cell in missing for cell in group):
                yield group
            else:
                shutil.rmtree(place, ignore_errors=True)

    def _digest(self, group: Sequence[Cell]) -> str:
        """A name for the fits of a group, with all that they depend on."""
        text = json.dumps([self.identity(cell) for cell in group], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def _checkpoints(self) -> Path:
        return self.folder / "checkpoints" / _name(self.problem.width)

    def _width(self) -> str:
        return "" if self.problem.width is None else f"width {self.problem.width}: "


def _name(width: int | None) -> str:
    return "network" if width is None else f"width-{width}"


def _order(seed: int) -> str:
    return f"seed {seed}"


def _orders(seeds: Sequence[int]) -> Callable[[Key], list[Key]]:
    """The orders of members by their seeds: each as `Reordered` has it for one fit alone."""
    return lambda key: [key.fold(_order(seed)) for seed in seeds]
