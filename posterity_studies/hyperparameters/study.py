"""Variational EM beside the best cell of a grid, over splits: the fits, the comparison, and its tables."""

import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

from posterity.cli.frame.output import table
from posterity.datasets.uci import num_splits
from posterity.inference.sweep import Result
from posterity_studies.frame import add_heading, notes, remark, title
from posterity_studies.hyperparameters.recipes import NOISE_SCALES, PRIOR_SCALES, RECIPES, SIDE
from posterity_studies.hyperparameters.runs import EM, GRID, Cell, fit_all, grid_key, stored
from posterity_studies.hyperparameters.settings import Settings
from posterity_studies.options import Report, silent
from posterity_studies.uci.summary import Mean, mean_and_error

GOAL = 0.05
"""Nats for each row by which variational EM may be worse than the best cell."""


@dataclass(frozen=True)
class Comparison:
    """One approximation on one data set.

    `grid` has the mean test NLL over splits at each prior scale (rows) and noise scale; `best` is the lowest of them,
    an oracle, at `best_prior_scale` and `best_noise_scale`, and `em` is that of variational EM. The standard error of
    their `difference` is that over splits of the difference on each. `split_oracle` lets the grid choose a cell of its
    own on each split, by the rows that it is scored on. `points` are the prior and noise of EM on each split.
    """

    data_set: str
    method: str
    splits: int
    grid: tuple[tuple[float, ...], ...]
    best: Mean
    best_prior_scale: float
    best_noise_scale: float
    em: Mean
    difference: Mean
    split_oracle: float
    points: tuple[tuple[float, float], ...]
    seconds: float

    @property
    def reached(self) -> bool:
        """Whether variational EM comes within the goal."""
        return self.difference.mean <= GOAL

    @property
    def at_the_edge(self) -> bool:
        """Whether a wider grid might have a better cell."""
        ends = {PRIOR_SCALES[0], PRIOR_SCALES[-1]}, {NOISE_SCALES[0], NOISE_SCALES[-1]}
        return self.best_prior_scale in ends[0] or self.best_noise_scale in ends[1]

    @property
    def point(self) -> tuple[float, float]:
        """Prior and noise of EM, as geometric means over splits."""
        priors, noises = zip(*self.points, strict=True)
        return geometric_mean(priors), geometric_mean(noises)

    def note(self) -> str:
        """The comparison as a sentence."""
        prior, noise = self.point
        edge = ", at the edge of the grid" if self.at_the_edge else ""
        return (
            f"{self.data_set}, {self.method}: variational EM is {'' if self.reached else 'not '}within {GOAL:g} of the "
            f"best cell; its prior scale is {prior:.2g} and its noise {noise:.2g}, those of the best cell "
            f"{self.best_prior_scale:.2g} and {self.best_noise_scale:.2g}{edge}"
        )


def geometric_mean(values: Sequence[float]) -> float:
    """exp of the mean of logs.

    >>> round(geometric_mean([1.0, 4.0]), 6)
    2.0
    """
    return math.exp(fmean(math.log(value) for value in values))


def comparisons(results: Sequence[Result[Cell]]) -> list[Comparison]:
    """One for each data set and approximation, in the order of the results."""
    groups: dict[tuple[str, str], list[Result[Cell]]] = {}
    for result in results:
        groups.setdefault((result.cell.data_set, result.cell.method), []).append(result)
    return [_compared(*place, group) for place, group in groups.items()]


def _compared(data_set: str, method: str, group: Sequence[Result[Cell]]) -> Comparison:
    order = sorted(group, key=lambda one: one.cell.split)
    em = [one.scores for one in order if one.cell.part == EM]
    cells = [one.scores for one in order if one.cell.part != EM]
    places = [(row, column) for row in range(SIDE) for column in range(SIDE)]
    means = {place: fmean(scores[grid_key(*place)] for scores in cells) for place in places}
    row, column = min(places, key=means.__getitem__)
    best = [scores[grid_key(row, column)] for scores in cells]
    found = [scores["test_nll"] for scores in em]
    return Comparison(
        data_set,
        RECIPES[method].label,
        len(em),
        tuple(tuple(means[row, column] for column in range(SIDE)) for row in range(SIDE)),
        mean_and_error(best),
        PRIOR_SCALES[row],
        NOISE_SCALES[column],
        mean_and_error(found),
        mean_and_error([ours - theirs for ours, theirs in zip(found, best, strict=True)]),
        fmean(min(scores.values()) for scores in cells),
        tuple((scores["prior_scale"], scores["noise_scale"]) for scores in em),
        sum(one.seconds for one in group),
    )


@dataclass(frozen=True)
class Study:
    """All that the study found: for each data set, approximation and split the results of EM and of the grid."""

    settings: Settings
    results: tuple[Result[Cell], ...]

    @property
    def comparisons(self) -> list[Comparison]:
        """One for each data set and approximation."""
        return comparisons(self.results)

    def notes(self) -> list[str]:
        """A sentence on each comparison."""
        return [one.note() for one in self.comparisons]

    def document(self) -> dict[str, Any]:
        """Every number of the study, ready for JSON."""
        return {
            "settings": self.settings.config(),
            "prior_scales": list(PRIOR_SCALES),
            "noise_scales": list(NOISE_SCALES),
            "comparisons": [asdict(one) for one in self.comparisons],
            "fits": [{**asdict(one.cell), **one.scores, "seconds": one.seconds} for one in self.results],
            "notes": self.notes(),
        }


def run(settings: Settings, folder: Path, report: Report = silent) -> Study:
    """Run the study, or the part of it that `folder` does not hold yet.

    `report` is told a line about each fit. Results that were made with other settings are refused.
    """
    jobs = settings.jobs or os.cpu_count() or 1
    cells = [
        Cell(name, method, split, part)
        for name in dict.fromkeys(settings.datasets)
        for method in dict.fromkeys(settings.methods)
        for split in range(min(settings.splits or num_splits(name), num_splits(name)))
        for part in (EM, GRID)
    ]
    done = {result.cell: result for result in stored(cells, folder, settings)}
    missing = [cell for cell in cells if cell not in done]
    if done:
        report(f"{len(done)} of {len(cells)} results are there already")
    for count, result in enumerate(fit_all(missing, folder, settings, jobs), start=1):
        done[result.cell] = result
        report(f"{count}/{len(missing)} {_progress(result)}")
    return Study(settings, tuple(done[cell] for cell in cells))


def _progress(result: Result[Cell]) -> str:
    scores = result.scores
    if result.cell.part == EM:
        said = f"NLL {scores['test_nll']:.4g}, prior {scores['prior_scale']:.3g}, noise {scores['noise_scale']:.3g}"
    else:
        said = f"best NLL {min(scores.values()):.4g}"
    return f"{result.cell}: {said}, {result.seconds:.1f} s"


def show(out: Any, study: Study) -> None:
    """Print the tables."""
    title(out, "Prior and noise by variational EM, against the best of a grid")
    rows = table("", "best of grid", "variational EM", "difference", "splits", wrap=False)
    for data_set, part in groupby(study.comparisons, lambda one: one.data_set):
        add_heading(rows, data_set)
        for one in part:
            rows.add_row(f"  {one.method}", str(one.best), str(one.em), str(one.difference), str(one.splits))
    out.print(rows)
    remark(out, "Test NLL in units of the target, mean ± standard error over splits.")
    notes(out, study.notes())
