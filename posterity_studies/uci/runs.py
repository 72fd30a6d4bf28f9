"""Fits of the study: one small file for each data set, method and split, so that a sweep resumes."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

from posterity import __version__
from posterity.inference import Method, infer
from posterity.inference.executor import in_processes, named
from posterity.inference.identity import identity
from posterity.inference.sweep import Result, stored_results, write_result
from posterity.model import Joint
from posterity.model.data import as_data
from posterity.posteriors import Posterior
from posterity.storage import Part
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
    read = lru_cache(maxsize=1)(standard_split)
    return stored_results(cells, folder, lambda cell: depends(read(cell.data_set, cell.split), cell.method, settings))


def fit(data_set: str, index: int, methods: Sequence[str], folder: Path, settings: Settings) -> list[Result[Cell]]:
    """Fit these methods to one split and store what each gave.

    A stage that several share is run once, and its seconds count for each.
    """
    split = standard_split(data_set, index)
    done: Done = {}
    results = []
    for method in methods:
        cell = Cell(data_set, method, index)
        with named(cell):
            scores, seconds = fitted(split, RECIPES[method], settings, done)
        results.append(write_result(cell, folder, depends(split, method, settings), scores, seconds))
    return results


def fitted(split: Split, recipe: Recipe, settings: Settings, done: Done) -> tuple[dict[str, float], float]:
    """The scores of a method with what it chose, and its seconds; `done` remembers stages for others to start from."""
    stages, begin = recipe.stages(settings), time.perf_counter()
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


def fit_all(missing: Sequence[Cell], folder: Path, settings: Settings, jobs: int) -> Iterator[list[Result[Cell]]]:
    """Fit these cells, in `jobs` processes of one thread each; give the results of a split as soon as it is done."""
    groups: dict[tuple[str, int], list[str]] = {}
    for cell in missing:
        groups.setdefault((cell.data_set, cell.split), []).append(cell.method)
    work = {
        f"{data_set} split {split}": partial(fit, data_set, split, tuple(methods), folder, settings)
        for (data_set, split), methods in groups.items()
    }
    return in_processes(work, jobs)
