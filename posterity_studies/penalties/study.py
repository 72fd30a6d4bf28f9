"""Fits of all penalties, means over seeds, the best lambdas beside published ones, and the tables."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from posterity.cli.frame.output import table
from posterity.inference import Sequential
from posterity.inference.sweep import Result
from posterity.model.data import as_data
from posterity.penalties import lambda_theory
from posterity.report.files import processor
from posterity_studies import options
from posterity_studies.frame import notes, remark, title
from posterity_studies.grids import row_as_json
from posterity_studies.options import Report, silent
from posterity_studies.penalties.grid import Grid, Row, best_of, missing, on_held_out, rows_of
from posterity_studies.penalties.problem import Cell, Problem, Rows, problem, read
from posterity_studies.penalties.published import PUBLISHED, Published
from posterity_studies.penalties.runs import VANISHED, Fits, Runs, fit_there
from posterity_studies.penalties.settings import Settings

CLOSE = 0.003  # of accuracy: 0.3 points
CHOICE = "highest mean accuracy over seeds on held-out training rows, of equals the least NLL there"


@dataclass(frozen=True)
class Part:
    """A penalty: lambda_l by setup, and `exchange` (see `Problem`)."""

    penalty: str
    factors: dict[str, dict[str, float]]
    exchange: float


@dataclass(frozen=True)
class Study:
    """The results: n, the penalties, a result for each fit, and the fits that diverged.

    `search` are the short runs that chose lambdas and step sizes, if any.
    """

    settings: Settings
    num_data: int
    held_out: int
    parts: tuple[Part, ...]
    results: tuple[Result[Cell], ...]
    failed: tuple[Cell, ...] = ()
    search: tuple[Result[Cell], ...] = ()

    def rows(self, penalty: str, setup: str) -> list[Row]:
        """Return a row for each lambda of a penalty in a setup that has fits, ascending."""
        part = next(part for part in self.parts if part.penalty == penalty)
        return rows_of(self.results, penalty, setup, part.exchange, self.num_data)

    def best(self, penalty: str, setup: str) -> Row | None:
        """Return the row at lambda*."""
        return best_of(self.rows(penalty, setup))

    def at_theory(self, penalty: str, setup: str) -> Row | None:
        """Return the row of the Bayesian setup at lambda_Th."""
        if setup != "bayesian":
            return None
        return next((row for row in self.rows(penalty, setup) if row.ratio == 1.0), None)

    @property
    def tunes_steps(self) -> bool:
        """Whether the step size is chosen for each lambda."""
        return len(self.settings.actual_step_sizes) > 1

    def at_end(self, row: Row) -> bool:
        """Return whether a row is at an end of its lambdas, so that the best may lie beyond."""
        cells = (*(result.cell for result in self.results), *self.failed)
        ratios = {cell.ratio for cell in cells if (cell.penalty, cell.setup) == (row.penalty, row.setup)}
        return bool(missing(row, sorted(ratios), self.settings))

    def fits(self, row: Row) -> list[Result[Cell]]:
        """Return the fits of a row, one for each seed."""
        wanted = (row.penalty, row.setup, row.ratio, row.step_size)
        return [
            result
            for result in self.results
            if (result.cell.penalty, result.cell.setup, result.cell.ratio, result.cell.step_size) == wanted
        ]

    def sparsest(self, penalty: str) -> Row | None:
        """Return the row with the fewest filters within 0.3 points of the penalty's best held-out accuracy."""
        rows = [row for setup in self.settings.setups for row in self.rows(penalty, setup)]
        if not rows:
            return None
        best = max(on_held_out(row)[0] for row in rows)
        close = [row for row in rows if on_held_out(row)[0] >= best - CLOSE]
        return min(close, key=lambda row: (row.scores["filters_left"][0], -on_held_out(row)[0]))

    def published(self, penalty: str, setup: str) -> Published | None:
        """Return the published numbers, for CIFAR-10."""
        return PUBLISHED.get((self.settings.net, setup, penalty)) if self.settings.data == "cifar-10" else None

    def notes(self) -> list[str]:
        """Return the results in a few lines."""
        lines = []
        for part in self.parts:
            for setup in self.settings.setups:
                best, theory = self.best(part.penalty, setup), self.at_theory(part.penalty, setup)
                if best is not None and self.at_end(best):
                    lines.append(f"{part.penalty}, {setup}: lambda* is at the end of the grid, and may lie beyond")
                if theory is not None and self.tunes_steps and theory.step_size == self.settings.actual_step_sizes[0]:
                    lines.append(
                        f"{part.penalty}, {setup}: at lambda_Th the shortest step size, {theory.step_size:g}, is best, "
                        "and a shorter one may be better"
                    )
                if best is not None and theory is not None:
                    lines.append(
                        f"{part.penalty}, {setup}: accuracy {_points(best):.2f} at lambda*, {_points(theory):.2f} at "
                        f"lambda_Th, lambda_Th / lambda* = {1 / best.ratio:.3g}"
                    )
        for part in self.parts:
            row = self.sparsest(part.penalty)
            if row is not None and row.scores["filters_left"][0] < 1.0:
                vanished = 100 - 100 * row.scores["filters_left"][0]
                lines.append(
                    f"{part.penalty}: {vanished:.0f} % of filters vanish ({row.setup}, "
                    f"lambda = {row.strength:.2g}) within 0.3 points of its best held-out accuracy; test accuracy "
                    f"{_points(row):.2f}, the smaller network's outputs differ by {self._difference(row):.1g} at most"
                )
        return lines + [f"{cell}: diverged, no result" for cell in self.failed]

    def _difference(self, row: Row, key: str = "pruned_difference") -> float:
        """Return the largest error of the pruned module over the seeds of a row."""
        return max(fit.scores[key] for fit in self.fits(row))

    def table(self) -> list[dict[str, Any]]:
        """Return a line for each penalty and setup: results at lambda* and at lambda_Th, and published ones."""
        results = []
        for part in self.parts:
            for setup in self.settings.setups:
                best, theory = self.best(part.penalty, setup), self.at_theory(part.penalty, setup)
                printed = self.published(part.penalty, setup)
                if best is None:
                    continue
                at_theory = None if theory is None else _points(theory)
                results.append(
                    {
                        "penalty": part.penalty,
                        "setup": setup,
                        "lambda_best": best.strength,
                        "lambda_best_at_the_end_of_the_grid": self.at_end(best),
                        "step_size_at_best": best.step_size,
                        "step_size_at_theory": None if theory is None else theory.step_size,
                        "accuracy_at_best": _pair(best.scores["accuracy"]),
                        "accuracy_at_theory": None if theory is None else _pair(theory.scores["accuracy"]),
                        "theory_over_best": 1.0 / best.ratio if setup == "bayesian" else None,
                        "log10_theory_over_best": -math.log10(best.ratio) if setup == "bayesian" else None,
                        "published": None if printed is None else asdict(printed),
                        "difference": None if printed is None else printed.difference(_points(best), at_theory),
                    }
                )
        return results

    def shown_fits(self) -> list[Result[Cell]]:
        """Return the fits at lambda* and at lambda_Th, whose learning curves are shown."""
        rows = [
            row
            for part in self.parts
            for setup in self.settings.setups
            for row in (self.best(part.penalty, setup), self.at_theory(part.penalty, setup))
            if row is not None
        ]
        return [fit for index, row in enumerate(rows) if row not in rows[:index] for fit in self.fits(row)]

    def document(self) -> dict[str, Any]:
        """Return all numbers of the study as JSON."""
        settings = self.settings
        sparsest = [row for part in self.parts if (row := self.sparsest(part.penalty)) is not None]
        rows = [row for part in self.parts for setup in settings.setups for row in self.rows(part.penalty, setup)]
        return {
            "settings": settings.config(),
            **processor(settings.device),
            "inference": {
                f"{part.penalty}, step size {step_size:g}": repr(
                    settings.inference(part.penalty, self.num_data, step_size, settings.actual_epochs)
                )
                for part in self.parts
                for step_size in settings.actual_step_sizes
            },
            "augmentation": repr(settings.augmentation),
            "width": settings.actual_width,
            "num_data": self.num_data,
            "held_out": self.held_out,
            "lambda_theory": lambda_theory(self.num_data),
            "lambda_best_is": CHOICE,
            "usual_setup": "lambda_l = 1 for l2 and l1, the root of the size of a group for group lasso",
            "bayesian_setup": "lambda_l with which a weight has variance 1 / fan-in under the penalty's prior",
            "seeds_differ_in": "first weights, order of training rows, changes of training images",
            "table": self.table(),
            "pruning_at_equal_accuracy": [
                {
                    **row_as_json(row),
                    "within": CLOSE,
                    "filters_vanished": 1.0 - row.scores["filters_left"][0],
                    "largest_pruned_difference": self._difference(row),
                    "largest_exact_difference": self._difference(row, "exact_difference"),
                    "vanished_by_layer": {
                        key.removeprefix(VANISHED): value[0] for key, value in row.scores.items() if VANISHED in key
                    },
                }
                for row in sparsest
            ],
            "penalties": [asdict(part) for part in self.parts],
            "rows": [row_as_json(row) for row in rows],
            "learning_curves": [{**asdict(fit.cell), **fit.curves} for fit in self.shown_fits()],
            "search": [
                {**asdict(result.cell), **{key: result.scores[key] for key in ("held_out_accuracy", "held_out_nll")}}
                for result in self.search
            ],
            "fits": [{**asdict(result.cell), **result.scores, "seconds": result.seconds} for result in self.results],
            "diverged": [asdict(cell) for cell in self.failed],
            "notes": self.notes(),
        }


def run(settings: Settings, folder: Path, report: Report = silent, rows: Rows | None = None) -> Study:
    """Run the study, or the part of it that `folder` does not hold yet; `report` gets a line about each fit.

    `rows` are what `read` gives, which is called without them. Lambdas, setups and seeds of a penalty and step size
    train together, as members, in groups for which there is memory, or in so many that `settings.jobs` processes have
    one each.
    """
    rows = read(settings) if rows is None else rows
    problems = {name: problem(name, rows, settings) for name in settings.penalties}
    fits = _Fits(problems, settings, folder, report, as_data(rows.train.pair).fingerprint())
    grids = [Grid(own, settings) for own in problems.values()]
    search: list[Result[Cell]] = []
    if settings.search_epochs:
        search = fits.of([cell for grid in grids for cell in grid.all(settings.search_epochs, seeds=1)])
        cells = [cell for grid in grids for cell in grid.around(search)]
    else:
        cells = [cell for grid in grids for cell in grid.all(settings.actual_epochs, settings.seeds)]
    results = fits.of(cells)
    for _ in range(settings.extend):
        more = [cell for grid in grids for cell in grid.beyond(results, cells, search)]
        cells = cells + more
        results = fits.of(cells) if more else results
    for runs in fits.begun:  # only now: a single run knows only its own cells, and would remove files of others
        runs.remove_checkpoints()
    parts = [
        Part(name, {setup: dict(factors) for setup, factors in own.factors.items()}, own.exchange)
        for name, own in problems.items()
    ]
    failed = tuple(cell for cell in cells if cell in fits.failed)
    return Study(settings, len(rows.train), len(rows.held_out), tuple(parts), tuple(results), failed, tuple(search))


@dataclass
class _Fits:
    """Fits each cell once, and keeps the cells whose fits diverged."""

    problems: dict[str, Problem]
    settings: Settings
    folder: Path
    report: Report
    fingerprint: str
    known: dict[Cell, Result[Cell]] = field(default_factory=dict)
    failed: set[Cell] = field(default_factory=set)
    begun: list[Runs] = field(default_factory=list)

    def of(self, cells: Sequence[Cell]) -> list[Result[Cell]]:
        """Return the results of these cells, in order, without diverged ones."""
        wanted = [cell for cell in cells if cell not in self.known and cell not in self.failed]
        runs = self._runs(wanted)
        for own, its in runs.items():
            self.known |= own.stored(its)
        left = {own: lacking for own, its in runs.items() if (lacking := [c for c in its if c not in self.known])}
        jobs, most = self.settings.jobs, self.settings.together
        if jobs > 1:
            share = max(1, math.ceil(sum(map(len, left.values())) / jobs))
            most = share if most is None else min(share, most)
        groups = [(own, group) for own, its in left.items() for group in own.groups(runs[own], its, most)]
        executor = options.executor(self.settings, len(groups))
        here = isinstance(executor, Sequential)
        work = {f"{own.name}, group {i}": _work(own, group, here) for i, (own, group) in enumerate(groups, start=1)}
        owners = {cell: own for own, group in groups for cell in group}
        for fits, lines in executor.results(work):
            for line in lines:
                self.report(line)
            for cell, fit in fits:
                if fit is not None:
                    owners[cell].store(fit)
                    self.known[cell] = fit
            self.failed |= {cell for cell, fit in fits if fit is None}
        self.begun += runs
        return [self.known[cell] for cell in cells if cell in self.known]

    def _runs(self, cells: Sequence[Cell]) -> dict[Runs, list[Cell]]:
        """Group cells by penalty, step size and length; a group runs together."""
        groups: dict[tuple[str, float, int], list[Cell]] = {}
        for cell in cells:
            groups.setdefault((cell.penalty, cell.step_size, cell.epochs), []).append(cell)
        return {
            Runs(
                self.problems[penalty],
                step_size,
                epochs,
                self.folder,
                self.settings,
                self.report,
                self.fingerprint,
                self.settings.jobs,
            ): own
            for (penalty, step_size, epochs), own in groups.items()
        }


def _work(runs: Runs, group: Sequence[Cell], here: bool) -> Callable[[], tuple[Fits, list[str]]]:
    if here:
        return lambda: (list(runs.fitted(group)), [])
    return partial(fit_there, runs.settings, runs.problem.penalty, group, runs.folder)


def _points(row: Row) -> float:
    return 100.0 * row.scores["accuracy"][0]


def _pair(values: tuple[float, float | None]) -> dict[str, float | None]:
    return {"mean": values[0], "standard_deviation": values[1]}


def show(out: Any, study: Study) -> None:
    """Print the tables."""
    settings = study.settings
    name = f"{settings.data}, {settings.architecture.label} of width {settings.actual_width}"
    title(out, f"{name}, n = {study.num_data:,}: test accuracy in per cent")
    lines = study.table()
    columns = ("at lambda*", "at lambda_Th", "lambda_Th / lambda*")
    rows = table("penalty, setup", "lambda*", *columns, *(["step sizes"] if study.tunes_steps else []))
    for line in lines:
        ratio = line["theory_over_best"]
        numbers = (_percent(line["accuracy_at_best"]), _percent(line["accuracy_at_theory"]))
        steps = [f"{line[key]:g}" for key in ("step_size_at_best", "step_size_at_theory") if line[key] is not None]
        rows.add_row(
            _name(line),
            f"{line['lambda_best']:.2g}",
            *numbers,
            "" if ratio is None else f"{ratio:.3g}",
            *([", ".join(steps)] if study.tunes_steps else []),
        )
    out.print(rows)
    seeds = f"Mean ± standard deviation over {settings.seeds} seeds" if settings.seeds > 1 else "One seed"
    choice = f"lambda* has the best accuracy on {study.held_out:,} held-out training rows."
    remark(out, f"{seeds}. {choice}")
    if any(line["published"] for line in lines):
        title(out, "As the authors had it, with networks and settings of their own (ours less theirs)")
        rows = table("penalty, setup", *columns)
        for line in lines:
            rows.add_row(_name(line), *_published(line["published"], line["difference"]))
        out.print(rows)
    notes(out, study.notes())


def _name(line: dict[str, Any]) -> str:
    return f"{line['penalty']}, {line['setup']}"


def _percent(pair: dict[str, float | None] | None) -> str:
    if pair is None or pair["mean"] is None:
        return ""
    spread = pair["standard_deviation"]
    return f"{100 * pair['mean']:.2f}" + ("" if spread is None else f" ± {100 * spread:.2f}")


def _published(line: dict[str, float | None] | None, difference: dict[str, float | None]) -> tuple[str, str, str]:
    if line is None:
        return "", "", ""
    best, theory = (
        "" if line[key] is None else f"{line[key]:.2f} ({difference[key]:+.2f})" for key in ("best", "at_theory")
    )
    return best, theory, "" if line["log_ratio"] is None else f"{10 ** line['log_ratio']:.3g}"
