"""Fits of the study: one small file for each data set, method and split, so that a sweep goes on where it stopped."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from posterity import __version__
from posterity.inference import Method, infer
from posterity.model import Joint
from posterity.model.data import as_data
from posterity.posteriors import Posterior
from posterity_studies.parallel import named, run_all
from posterity_studies.results import Identity, Result, read_result, write_result
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


def identity(split: Split, method: str, settings: Settings) -> Identity:
    """All that the numbers of a cell depend on.

    The problem and the methods are there as they print, so that a default that has changed tells.
    """
    recipe = RECIPES[method]
    joint = recipe.problem(split, settings)
    return {
        "data set": split.data_set,
        "split": split.index,
        "method": method,
        **settings.config(),
        "stages": [repr(stage) for stage in recipe.stages(settings)],
        **({} if recipe.candidates is None else {"candidates": recipe.candidates}),
        "prior": repr(joint.prior),
        "likelihood": repr(joint.likelihood),
        "hidden units": hidden_units(split.data_set),
        "training rows": as_data(split.train).fingerprint(),
        "test rows": as_data(split.test).fingerprint(),
        "posterity": __version__,
    }


def stored(cells: Sequence[Cell], folder: Path, settings: Settings) -> Iterator[Result[Cell]]:
    """The results of those cells that have one; BadFolder at one that is damaged or of other settings."""
    place, split = None, None
    for cell in cells:
        if not cell.path(folder).exists():
            continue
        if split is None or place != (cell.data_set, cell.split):
            place, split = (cell.data_set, cell.split), standard_split(cell.data_set, cell.split)
        yield Result(cell, *read_result(cell.path(folder), identity(split, cell.method, settings)))


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
        write_result(cell.path(folder), identity(split, method, settings), scores, seconds)
        results.append(Result(cell, scores, seconds))
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
        start, before = _run(split, joint, recipe, stages[:-1], settings, done) if len(stages) > 1 else (None, 0.0)
        begin = time.perf_counter()
        seed = settings.key(split.data_set, split.index).seed
        posterior, _ = infer(stages[-1], joint, split.train, start=start, seed=seed, progress=False)
        done[known] = posterior, before + time.perf_counter() - begin
    return done[known]


def fit_all(missing: Sequence[Cell], folder: Path, settings: Settings, jobs: int) -> Iterator[list[Result[Cell]]]:
    """Fit these cells, in `jobs` processes of one thread each; give the results of a split as soon as it is done."""
    groups: dict[tuple[str, int], list[str]] = {}
    for cell in missing:
        groups.setdefault((cell.data_set, cell.split), []).append(cell.method)
    work = [partial(fit, *place, tuple(methods), folder, settings) for place, methods in groups.items()]
    return run_all(work, jobs)
