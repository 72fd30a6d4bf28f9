"""Sweeps: fits over a grid that keep scores instead of posteriors, one small file per fit."""

import hashlib
import json
import math
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import ClassVar, Generic, Protocol, TypeAlias, TypeVar

import torch

from posterity.errors import BadFolder, Diverged
from posterity.inference.callbacks import Callback, ProgressBar, moves_bar, tracked
from posterity.inference.checkpoint import Checkpoint
from posterity.inference.executor import first_line, in_halves, largest_group
from posterity.inference.identity import refuse_other
from posterity.inference.run import Trace
from posterity.inference.task import Task
from posterity.model.problem import data_of
from posterity.numerics.random import Key
from posterity.posteriors.posterior import Posterior
from posterity.storage import Part
from posterity.storage.disk import write_file

SECONDS = 300.0  # between checkpoints of a group, which can take gigabytes
LEAST = 60.0  # seconds of a group below which none is written, as that may take longer than the fits


class Cell(Protocol):
    """A fit of a grid: a frozen dataclass of strings and numbers with a short `str`."""

    def path(self, folder: Path) -> Path:
        """Return the file of the scores in the folder of the grid."""
        ...


C = TypeVar("C", bound=Cell)

Curves: TypeAlias = dict[str, list[list[float]]]
"""Columns of the trace by name, each a list of pairs [step, value]."""


@dataclass(frozen=True)
class Result(Generic[C]):
    """The scores of a cell, the seconds of its fit, or its share of the seconds of a group, and its learning curves."""

    cell: C
    scores: dict[str, float]
    seconds: float
    curves: Curves = field(default_factory=dict)


def write_result(
    cell: C, folder: Path, identity: Part, scores: dict[str, float], seconds: float, curves: Curves | None = None
) -> Result[C]:
    """Write the scores and curves of a cell with everything that they depend on, atomically."""
    document = {"identity": identity.config, "scores": scores, "seconds": seconds}
    if curves:
        document["curves"] = curves
    write_file(cell.path(folder), (json.dumps(document, indent=2, allow_nan=False) + "\n").encode())
    return Result(cell, scores, seconds, curves or {})


def stored_results(cells: Sequence[C], folder: Path, identity: Callable[[C], Part]) -> Iterator[Result[C]]:
    """Yield the stored results of the cells; raises BadFolder at a damaged file or one of other settings."""
    remedy = "Use another folder, or delete the folder 'runs' in this one."
    for cell in cells:
        path = cell.path(folder)
        if not path.exists():
            continue
        try:
            content = json.loads(path.read_bytes())
            known, scores, seconds = content["identity"], content["scores"], content["seconds"]
            if not isinstance(known, dict) or not all(map(math.isfinite, (*scores.values(), seconds))):
                raise ValueError("not a result")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            message = f"'{path}' holds no result of the study. Delete it, and it is computed again."
            raise BadFolder(message) from error
        refuse_other(path, identity(cell), Part(known), "a fit with other settings", remedy)
        yield Result(cell, scores, seconds, content.get("curves", {}))


class Sweep(ABC, Generic[C]):
    """Fits over a grid, each with a file of its scores.

    Cells step together, as members, in groups that fit into memory. A file has the scores of a cell and everything
    that they depend on, so an interrupted sweep resumes; an interrupted group resumes from its checkpoint.
    """

    folder: Path
    report: Callable[[str], None]
    columns: ClassVar[tuple[str, ...]] = ()
    """Columns of the trace that are stored with the scores, as learning curves."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Prefix of messages about the sweep; empty for a single sweep."""

    @abstractmethod
    def identity(self, cell: C) -> Part:
        """Return everything that the numbers of a cell depend on."""

    @abstractmethod
    def room(self, cells: Sequence[C]) -> bool:
        """Return whether these fits together fit into memory."""

    @abstractmethod
    def task(self, cells: Sequence[C]) -> Task:
        """Return the fit of a cell, or of several as members."""

    @abstractmethod
    def scores(self, cell: C, posterior: Posterior) -> dict[str, float]:
        """Return the scores of a cell; raises Diverged where its outputs are not finite."""

    def recorded(self, trace: Trace, index: int) -> dict[str, float]:
        """Return further scores of the fit at `index` of its group, from the trace of their run; by default none."""
        return {}

    @abstractmethod
    def summary(self, scores: dict[str, float]) -> str:
        """Return the scores for a message about a cell."""

    def setting(self) -> AbstractContextManager[None]:
        """Return the context in which fits run; by default an empty one."""
        return nullcontext()

    def callbacks(self) -> Sequence[Callback]:
        """Return the callbacks of a fit; by default none."""
        return ()

    def results(self, cells: Sequence[C], most: int | None = None) -> tuple[list[Result[C]], list[C]]:
        """Return the results of all cells, stored or fitted now, and the cells whose fits diverged."""
        results = self.stored(cells)
        failed: list[C] = []
        groups = [*self.groups(cells, [cell for cell in cells if cell not in results], most)]
        for group in tracked(groups, "groups of fits"):
            for cell, result in self.fitted(group):
                if result is None:
                    failed.append(cell)
                else:
                    results[cell] = result
        self.remove_checkpoints()
        return [results[cell] for cell in cells if cell in results], failed

    def stored(self, cells: Sequence[C]) -> dict[C, Result[C]]:
        """Return the stored results by cell; raises BadFolder at a damaged file or one of other settings."""
        results = {result.cell: result for result in stored_results(cells, self.folder, self.identity)}
        if results:
            self._tell(f"{len(results)} of {len(cells)} fits are there already")
        return results

    def groups(self, cells: Sequence[C], missing: Sequence[C], most: int | None = None) -> Iterator[list[C]]:
        """Yield groups of cells that step together until none is `missing`: interrupted groups, then new ones.

        A new group has at most `most` cells, and no more than fit into memory.
        """
        left = list(missing)
        for begun in self._begun(cells, missing):
            left = [cell for cell in left if cell not in begun]
            self._tell(f"takes up {len(begun)} fits that were interrupted")
            yield begun
        if left:
            size = largest_group(left, min(most or len(left), len(left)), self.room, self._tell)
            yield from (left[low : low + size] for low in range(0, len(left), size))

    def fitted(self, group: Sequence[C]) -> Iterator[tuple[C, Result[C] | None]]:
        """Fit a group and store missing scores; yields None for a cell without scores.

        A group that diverges or runs out of memory is fitted in halves.
        """
        for cells, result in in_halves(group, self._fit, (Diverged, torch.OutOfMemoryError), self._tell):
            if isinstance(result, torch.OutOfMemoryError):
                raise result
            if isinstance(result, Exception):
                self.report(f"{cells[0]}: no result. {first_line(result)}")
                yield cells[0], None
                continue
            posterior, trace = result
            seconds = trace.seconds / len(cells)  # includes the seconds before an interruption
            for index, cell in enumerate(cells):
                member = posterior.member(index) if len(cells) > 1 else posterior
                earlier = next(stored_results([cell], self.folder, self.identity), None)
                yield cell, earlier or self._scored(cell, member, seconds, trace, index)
            shutil.rmtree(self._checkpoint(cells), ignore_errors=True)

    def store(self, result: Result[C]) -> None:
        """Write the result of a fit on another machine, unless its file is there."""
        if not result.cell.path(self.folder).exists():
            identity = self.identity(result.cell)
            write_result(result.cell, self.folder, identity, result.scores, result.seconds, result.curves)

    def _fit(self, cells: Sequence[C]) -> tuple[Posterior, Trace]:
        path, task = self._checkpoint(cells), self.task(cells)
        write_file(path / "cells.json", json.dumps([asdict(cell) for cell in cells]).encode())  # type: ignore[call-overload]
        count = "a fit" if len(cells) == 1 else f"{len(cells)} fits together"
        rows = data_of(task.joint, task.data)
        steps = len(task.method.settled(task.joint, rows).batches(rows, Key(task.seed)))
        self._tell(f"{count}, {steps:,} steps")
        try:
            with self.setting():
                shown = [ProgressBar()] if moves_bar() else []
                return task.run(Checkpoint(path / "run", seconds=SECONDS, least=LEAST), [*self.callbacks(), *shown])
        except (Diverged, torch.OutOfMemoryError):
            shutil.rmtree(path, ignore_errors=True)
            raise

    def _curves(self, trace: Trace, index: int) -> Curves:
        """Return the stored columns of the trace of a fit, which may be one of several members."""
        curves: Curves = {}
        for name in (column for column in self.columns if column in trace):
            values = trace[name] if trace[name].dim() == 1 else trace[name][:, index]
            curves[name] = [list(pair) for pair in zip(trace.steps(name).tolist(), values.tolist(), strict=True)]
        return curves

    def _scored(self, cell: C, posterior: Posterior, seconds: float, trace: Trace, index: int) -> Result[C] | None:
        """Score and store a fit; returns None, and reports why, where its outputs are not finite."""
        scores: dict[str, float] = {}
        try:
            scores = self.scores(cell, posterior) | self.recorded(trace, index)
            why = next((f"Its {name} is {value}." for name, value in scores.items() if not math.isfinite(value)), "")
        except Diverged as error:
            why = str(error)
        if why:
            self.report(f"{cell}: no result. {why}")
            return None
        result = write_result(cell, self.folder, self.identity(cell), scores, seconds, self._curves(trace, index))
        self.report(f"{cell}: {self.summary(scores)}, {seconds:.1f} s")
        return result

    def remove_checkpoints(self) -> None:
        """Remove all checkpoints of the sweep."""
        shutil.rmtree(self._checkpoints, ignore_errors=True)
        with suppress(OSError):  # other sweeps have checkpoints there
            self._checkpoints.parent.rmdir()

    def _begun(self, cells: Sequence[C], missing: Sequence[C]) -> Iterator[list[C]]:
        """Yield groups with a checkpoint of these settings and a missing cell; remove other checkpoints."""
        known = {json.dumps(asdict(cell), sort_keys=True): cell for cell in cells}  # type: ignore[call-overload]
        for path in sorted(self._checkpoints.glob("*")):
            try:
                stored = json.loads((path / "cells.json").read_bytes())
                group = [known[json.dumps(cell, sort_keys=True)] for cell in stored]
            except (OSError, ValueError, TypeError, KeyError):
                group = []
            if self._checkpoint(group) == path and any(cell in missing for cell in group):
                yield group
            else:
                shutil.rmtree(path, ignore_errors=True)

    def _checkpoint(self, group: Sequence[C]) -> Path:
        """Return the folder of a group's checkpoint, named by a hash of everything its fits depend on."""
        text = json.dumps([self.identity(cell).config for cell in group], sort_keys=True)
        return self._checkpoints / hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def _checkpoints(self) -> Path:
        return self.folder / "checkpoints" / (self.name or "all")

    def _tell(self, line: str) -> None:
        self.report(f"{self.name}: {line}" if self.name else line)
