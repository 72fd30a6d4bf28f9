"""Fits of the study: one small file for each data set, method and split, so that a sweep resumes."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

from posterity import __version__
from posterity.errors import PosterityError
from posterity.inference import Batched, Method, Task, infer
from posterity.inference.executor import named
from posterity.inference.identity import identity
from posterity.inference.sweep import Result, stored_results, write_result
from posterity.model import Joint
from posterity.model.data import as_data
from posterity.posteriors import Posterior
from posterity.storage import Part
from posterity_studies import options
from posterity_studies.uci.protocol import Split, hidden_units, standard_split
from posterity_studies.uci.recipes import RECIPES, Recipe
from posterity_studies.uci.settings import Settings

Done = dict[tuple[Callable[..., Joint], tuple[Method, ...]], tuple[Posterior, float]]


@dataclass(frozen=True)
class Cell:
    """One data set, method and split."""

    data_set: str
    method: str
    split: int

    def path(self, folder: Path) -> Path:
        """Its file in the folder of the study."""
        return folder / "runs" / self.data_set / self.method / f"split-{self.split:02d}.json"

    def __str__(self) -> str:
        return f"{self.data_set}, {RECIPES[self.method].label}, split {self.split}"


def depends(split: Split, method: str, settings: Settings) -> Part:
    """All that the numbers of a cell depend on."""
    recipe = RECIPES[method]
    joint = recipe.problem(split, settings)
    chosen = {} if recipe.candidates is None else {"candidates": recipe.candidates}
    stages = recipe.stages(settings)
    return depends_on_split(
        split, method, settings, stages=stages, **chosen, prior=joint.prior, likelihood=joint.likelihood
    )


def depends_on_split(split: Split, method: str, settings: Settings, **how: object) -> Part:
    """All that the numbers of a method on a split depend on, with `how` it is fitted."""
    parts = {
        "data set": split.data_set,
        "split": split.index,
        "method": method,
        **settings.config(),
        **how,
        "hidden units": hidden_units(split.data_set),
        "training rows": as_data(split.train),
        "test rows": as_data(split.test),
    }
    return identity(**parts, posterity=__version__)


def stored(cells: Sequence[Cell], folder: Path, settings: Settings) -> Iterator[Result[Cell]]:
    """The results of those cells that have one; BadFolder at one that is damaged or of other settings."""
    read = lru_cache(maxsize=1)(partial(standard_split, constants=settings.constants))
    return stored_results(cells, folder, lambda cell: depends(read(cell.data_set, cell.split), cell.method, settings))


def fit(split: Split, methods: Sequence[str], settings: Settings) -> list[Result[Cell]]:
    """Fit these methods to one split; returns what each gave.

    A stage that several share is run once, and its seconds count for each.
    """
    done: Done = {}
    results = []
    for method in methods:
        cell = Cell(split.data_set, method, split.index)
        with named(cell):
            results.append(Result(cell, *fitted(split, RECIPES[method], settings, done)))
    return results


def fitted(split: Split, recipe: Recipe, settings: Settings, done: Done) -> tuple[dict[str, float], float]:
    """The scores of a method with what it chose, and its seconds; `done` remembers stages for others to start from."""
    stages, begin = recipe.stages(settings), time.perf_counter()
    if recipe.alone is not None:
        return split.scores(recipe.alone(split, settings)), time.perf_counter() - begin
    choice = recipe.choose and recipe.choose(split, settings, stages[-1])
    choosing = time.perf_counter() - begin
    joint = recipe.problem(split, settings, *(() if choice is None else (choice,)))
    posterior, seconds = _run(split, joint, recipe, stages, settings, done)
    return {**split.scores(recipe.predict(posterior, split.test.inputs)), **(choice or {})}, choosing + seconds


def _run(
    split: Split, joint: Joint, recipe: Recipe, stages: tuple[Method, ...], settings: Settings, done: Done
) -> tuple[Posterior, float]:
    """The posterior after these stages, and the seconds they took; `done` remembers what has been run."""
    known = recipe.problem, stages
    if known not in done:
        *earlier, last = stages
        start, before = _run(split, joint, recipe, tuple(earlier), settings, done) if earlier else (None, 0.0)
        begin = time.perf_counter()
        seed = settings.key(split.data_set, split.index).seed
        posterior, _ = infer(last, joint, split.train, start=start, seed=seed, progress=False)
        done[known] = posterior, before + time.perf_counter() - begin
    return done[known]


class Piece(NamedTuple):
    """Cells that are fitted in one go: several methods on one split, or one method on several splits."""

    data_set: str
    splits: tuple[int, ...]
    methods: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.data_set} split {', '.join(map(str, self.splits))}"


def together(cells: Sequence[Cell]) -> list[Piece]:
    """Group the cells: by split, but by data set and method where all splits are fitted at once."""
    groups: dict[tuple[str, int | str], list[Cell]] = {}
    for cell in cells:
        group = cell.method if RECIPES[cell.method].together else cell.split
        groups.setdefault((cell.data_set, group), []).append(cell)
    return [
        Piece(name, tuple(dict.fromkeys(c.split for c in each)), tuple(dict.fromkeys(c.method for c in each)))
        for (name, _), each in groups.items()
    ]


def fit_splits(splits: Sequence[Split], method: str, settings: Settings) -> list[Result[Cell]]:
    """Fit a method to all these splits at once, as members; returns what each gave, with its share of seconds."""
    recipe, begin = RECIPES[method], time.perf_counter()
    (stage,), joint = recipe.stages(settings), recipe.problem(splits[0], settings)
    keys = [settings.key(split.data_set, split.index) for split in splits]
    tasks = [
        Task(f"split {split.index}", stage, joint, split.train, seed=key.seed)
        for split, key in zip(splits, keys, strict=True)
    ]
    outcomes, results = Batched().run(tasks, progress=False), []
    seconds = (time.perf_counter() - begin) / len(splits)
    for split, outcome in zip(splits, outcomes, strict=True):
        cell = Cell(split.data_set, method, split.index)
        if outcome.posterior is None:
            raise PosterityError(f"{cell}: {outcome.error}")
        results.append(Result(cell, split.scores(recipe.predict(outcome.posterior, split.test.inputs)), seconds))
    return results


def fit_all(pieces: Sequence[Piece], folder: Path, settings: Settings) -> Iterator[list[Result[Cell]]]:
    """Fit these pieces where the settings say; store and give the results of each as soon as it is done.

    The rows go along with the work, and this process stores the results: no other machine needs the files.
    """
    work: dict[str, Callable[[], list[Result[Cell]]]] = {}
    splits: dict[tuple[str, int], Split] = {}
    for piece in pieces:
        data_set, indices, methods = piece
        for index in indices:
            if (data_set, index) not in splits:
                splits[data_set, index] = standard_split(data_set, index, settings.constants)
        rows = [splits[data_set, index] for index in indices]
        if RECIPES[methods[0]].together:
            work[f"{piece}, {methods[0]}"] = partial(fit_splits, rows, methods[0], settings)
        else:
            work[str(piece)] = partial(fit, rows[0], methods, settings)
    for results in options.executor(settings, len(work)).results(work):
        for result in results:
            how = depends(splits[result.cell.data_set, result.cell.split], result.cell.method, settings)
            write_result(result.cell, folder, how, result.scores, result.seconds)
        yield results
