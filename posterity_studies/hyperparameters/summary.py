"""Variational EM beside the best cell of the grid, over splits."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from posterity.inference.sweep import Result
from posterity_studies.hyperparameters.recipes import NOISE_SCALES, PRIOR_SCALES, RECIPES, SIDE
from posterity_studies.hyperparameters.runs import EM, Cell, grid_key
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
