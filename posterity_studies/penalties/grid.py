"""The fits of a penalty: its whole grid, or a search in short runs and long runs around the best."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from posterity.inference.sweep import Result
from posterity.penalties import lambda_theory
from posterity_studies.grids import nearest, over_seeds
from posterity_studies.penalties.problem import Cell, Problem
from posterity_studies.penalties.settings import Settings

SPACING = 10.0**0.5  # ratio of neighbouring lambdas


@dataclass(frozen=True)
class Row:
    """A penalty in a setup at a lambda: mean and standard deviation over seeds (None for one) of each score.

    `relative` is the penalty of the first weights over that in the Bayesian setup at lambda_Th: there `ratio` itself.
    `step_size` is the best on held-out rows of those that were tried at this lambda.
    """

    penalty: str
    setup: str
    ratio: float
    step_size: float
    strength: float
    relative: float
    seeds: int
    scores: dict[str, tuple[float, float | None]]


def rows_of(results: Iterable[Result[Cell]], penalty: str, setup: str, exchange: float, num_data: int) -> list[Row]:
    """Return a row for each lambda of a penalty in a setup with fits, ascending; `exchange` as in `Problem`."""
    fits: dict[float, dict[float, list[dict[str, float]]]] = {}
    for result in results:
        if (result.cell.penalty, result.cell.setup) == (penalty, setup):
            fits.setdefault(result.cell.ratio, {}).setdefault(result.cell.step_size, []).append(result.scores)
    rows = []
    for ratio, by_step in sorted(fits.items()):
        relative = ratio if setup == "bayesian" else ratio / exchange
        tried = [
            Row(penalty, setup, ratio, step_size, ratio * lambda_theory(num_data), relative, len(own), over_seeds(own))
            for step_size, own in sorted(by_step.items())
        ]
        most = max(row.seeds for row in tried)  # a step size at which a seed diverged cannot be chosen
        rows.append(max((row for row in tried if row.seeds == most), key=on_held_out))
    return rows


def on_held_out(row: Row) -> tuple[float, float]:
    """Return accuracy and minus NLL on held-out rows, by which rows are compared."""
    return row.scores["held_out_accuracy"][0], -row.scores["held_out_nll"][0]


def best_of(rows: Sequence[Row]) -> Row | None:
    """Return the row at lambda*: the highest mean accuracy on held-out rows, then the lowest NLL."""
    return max(rows, key=on_held_out, default=None)


def neighbours(ratio: float, ratios: Sequence[float]) -> tuple[float, float]:
    """Return the next of `ratios` below and above, or half a power of ten away if there is none.

    What is 1 but for a rounded `ratio` is 1, lambda_Th itself.

    >>> neighbours(1.0, (0.1, 1.0)), neighbours(0.316, ())
    ((0.1, 3.16227766017), (0.0999279740613, 1.0))
    """
    below = max((other for other in ratios if other < ratio), default=ratio / SPACING)
    above = min((other for other in ratios if other > ratio), default=ratio * SPACING)
    return _rounded(below), _rounded(above)


def _rounded(ratio: float) -> float:
    return 1.0 if math.isclose(ratio, 1.0, rel_tol=0.01) else float(f"{ratio:.12g}")


@dataclass(frozen=True, eq=False)
class Grid:
    """The fits of a penalty."""

    problem: Problem
    settings: Settings

    def all(self, epochs: int, seeds: int) -> list[Cell]:
        """Return cells of all lambdas and step sizes, by seed, setup and lambda."""
        return [
            Cell(self.problem.penalty, setup, ratio, step_size, epochs, seed)
            for seed in range(seeds)
            for setup in self.settings.setups
            for ratio in self.problem.ratios(setup, self.settings)
            for step_size in self.settings.actual_step_sizes
        ]

    def around(self, search: Sequence[Result[Cell]]) -> list[Cell]:
        """Return cells at each setup's best lambda of a search, its neighbours and lambda_Th, by best step size."""
        cells = []
        for setup in self.settings.setups:
            rows = self._rows(search, setup)
            best = best_of(rows)
            if best is None:
                continue
            ratios = [best.ratio, *neighbours(best.ratio, ())]
            if setup == "bayesian" and nearest(ratios, 1.0) is None:
                ratios.append(1.0)
            cells += [cell for ratio in sorted(ratios) for cell in self._at(setup, ratio, rows)]
        return cells

    def beyond(
        self, fitted: Sequence[Result[Cell]], tried: Iterable[Cell], search: Sequence[Result[Cell]]
    ) -> list[Cell]:
        """Return the neighbours of lambda* that are not in `tried`."""
        cells, known = [], list(tried)
        for setup in self.settings.setups:
            best = best_of(self._rows(fitted, setup))
            ratios = [cell.ratio for cell in known if (cell.penalty, cell.setup) == (self.problem.penalty, setup)]
            for ratio in missing(best, ratios, self.settings):
                cells += self._at(setup, ratio, self._rows(search, setup))
        return cells

    def _at(self, setup: str, ratio: float, search: Sequence[Row]) -> list[Cell]:
        """Return cells of a lambda by seed, at the best step size of the nearest searched lambda, or at each."""
        step_sizes = self.settings.actual_step_sizes
        if search:
            best = best_of(search)
            assert best is not None
            centre = best.ratio  # of two equally near lambdas take the one nearer to the best
            near = min(search, key=lambda row: (round(_apart(row.ratio, ratio), 6), _apart(row.ratio, centre)))
            step_sizes = (near.step_size,)
        epochs, seeds = self.settings.actual_epochs, range(self.settings.seeds)
        return [
            Cell(self.problem.penalty, setup, ratio, step_size, epochs, seed)
            for step_size in step_sizes
            for seed in seeds
        ]

    def _rows(self, results: Sequence[Result[Cell]], setup: str) -> list[Row]:
        return rows_of(results, self.problem.penalty, setup, self.problem.exchange, self.problem.num_data)


def missing(best: Row | None, ratios: Sequence[float], settings: Settings) -> list[float]:
    """Return the untried ratios next to lambda*: after a search its neighbours, else those beyond the end of the grid.

    A single lambda that was asked for has none beside it.
    """
    if best is None or len(ratios) < 2:
        return []
    beside = neighbours(best.ratio, () if settings.search_epochs else ratios)
    return [ratio for ratio in beside if nearest(ratios, ratio) is None]


def _apart(left: float, right: float) -> float:
    """Return the distance of the logarithms."""
    return abs(math.log(left / right))
