"""Fits of all penalties, means over seeds, the best lambdas beside published ones, and the tables."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from posterity.cli.frame.output import table
from posterity.inference.executor import in_processes
from posterity.inference.sweep import Result
from posterity.model.data import as_data
from posterity.penalties import lambda_theory
from posterity.report.files import processor
from posterity_studies.frame import notes, remark, title
from posterity_studies.grids import mean_and_spread, row_as_json
from posterity_studies.options import Report, silent
from posterity_studies.penalties.problem import Cell, Rows, problem, read
from posterity_studies.penalties.runs import VANISHED, Fits, Runs, fit_there
from posterity_studies.penalties.settings import Settings


@dataclass(frozen=True)
class Published:
    """Test accuracies in per cent at the best lambda and at lambda_Th, and log10 of lambda_Th / lambda*."""

    best: float
    at_theory: float | None = None
    log_ratio: float | None = None


def _rows(
    net: str,
    usual: tuple[float, ...],
    best: tuple[float, ...],
    at_theory: tuple[float, ...],
    log_ratios: tuple[float, ...],
) -> dict[tuple[str, str, str], Published]:
    names = ("l2", "l1", "rows", "columns")
    results = {(net, "usual", name): Published(accuracy) for name, accuracy in zip(names, usual, strict=True)}
    rows = zip(names, best, at_theory, log_ratios, strict=True)
    return results | {(net, "bayesian", name): Published(*numbers) for name, *numbers in rows}


# By network, setup and penalty, from slides on Wolinski, Charpiat and Ollivier (2020), An equivalence between Bayesian
# priors and penalties in variational inference. They name no data set; that of the paper is CIFAR-10.
PUBLISHED: Mapping[tuple[str, str, str], Published] = MappingProxyType(
    {
        **_rows(
            "cvnn",
            (88.00, 88.36, 88.43, 88.04),
            (88.69, 88.41, 88.67, 88.32),
            (88.25, 87.48, 87.45, 85.49),
            (0.5, 1.0, 2.0, 1.5),
        ),
        **_rows(
            "vgg19",
            (93.35, 93.17, 92.78, 93.37),
            (93.48, 92.89, 92.35, 93.03),
            (93.28, 92.74, 92.24, 92.85),
            (1.0, 1.0, 2.0, 1.0),
        ),
    }
)


CLOSE = 0.003  # of accuracy: 0.3 points
CHOICE = "highest mean accuracy over seeds on held-out training rows, of equals the least NLL there"


@dataclass(frozen=True)
class Row:
    """A penalty in a setup at a lambda: mean and standard deviation over seeds (None for one) of each score.

    `relative` is the penalty of the first weights over that in the Bayesian setup at lambda_Th: there `ratio` itself.
    """

    penalty: str
    setup: str
    ratio: float
    strength: float
    relative: float
    seeds: int
    scores: dict[str, tuple[float, float | None]]


@dataclass(frozen=True)
class Part:
    """A penalty: lambda / lambda_Th by setup, ascending, lambda_l by setup, and `exchange` (see `Problem`)."""

    penalty: str
    ratios: dict[str, tuple[float, ...]]
    factors: dict[str, dict[str, float]]
    exchange: float


@dataclass(frozen=True)
class Study:
    """All that the study found: n, the penalties, a result for each fit, and the fits that diverged."""

    settings: Settings
    num_data: int
    held_out: int
    parts: tuple[Part, ...]
    results: tuple[Result[Cell], ...]
    failed: tuple[Cell, ...] = ()

    def rows(self, penalty: str, setup: str) -> list[Row]:
        """The lambdas of a penalty in a setup, ascending, without those that have no fit; none of a setup not run."""
        part = next(part for part in self.parts if part.penalty == penalty)
        results = []
        for ratio in part.ratios.get(setup, ()):
            wanted = (penalty, setup, ratio)
            values = [
                result.scores
                for result in self.results
                if (result.cell.penalty, result.cell.setup, result.cell.ratio) == wanted
            ]
            if values:
                scores = {key: mean_and_spread([scores[key] for scores in values]) for key in values[0]}
                relative = ratio if setup == "bayesian" else ratio / part.exchange
                strength = ratio * lambda_theory(self.num_data)
                results.append(Row(penalty, setup, ratio, strength, relative, len(values), scores))
        return results

    def best(self, penalty: str, setup: str) -> Row | None:
        """The row at lambda*, chosen on held-out rows: the highest mean accuracy, of equals the least NLL."""
        return max(self.rows(penalty, setup), key=_on_held_out, default=None)

    def at_theory(self, penalty: str, setup: str) -> Row | None:
        """The row at lambda_Th, which the Bayesian setup has."""
        if setup != "bayesian":
            return None
        return next((row for row in self.rows(penalty, setup) if row.ratio == 1.0), None)

    def at_end(self, row: Row) -> bool:
        """Whether a row is the first or last of its lambdas, so that the best may lie beyond."""
        rows = self.rows(row.penalty, row.setup)
        return len(rows) > 1 and row.ratio in (rows[0].ratio, rows[-1].ratio)

    def sparsest(self, penalty: str) -> Row | None:
        """The row with the fewest filters of those within 0.3 points of the penalty's best held-out accuracy."""
        rows = [row for setup in self.settings.setups for row in self.rows(penalty, setup)]
        if not rows:
            return None
        best = max(_on_held_out(row)[0] for row in rows)
        close = [row for row in rows if _on_held_out(row)[0] >= best - CLOSE]
        return min(close, key=lambda row: (row.scores["filters_left"][0], -_on_held_out(row)[0]))

    def published(self, penalty: str, setup: str) -> Published | None:
        """The authors' numbers, for CIFAR-10."""
        return PUBLISHED.get((self.settings.net, setup, penalty)) if self.settings.data == "cifar-10" else None

    def notes(self) -> list[str]:
        """What the study shows, in a few lines."""
        lines = []
        for part in self.parts:
            for setup in self.settings.setups:
                best, theory = self.best(part.penalty, setup), self.at_theory(part.penalty, setup)
                if best is not None and self.at_end(best):
                    lines.append(f"{part.penalty}, {setup}: lambda* is at the end of the grid, and may lie beyond")
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
        """The largest over the seeds of a row."""
        wanted = (row.penalty, row.setup, row.ratio)
        cells = [
            result for result in self.results if (result.cell.penalty, result.cell.setup, result.cell.ratio) == wanted
        ]
        return max(cell.scores[key] for cell in cells)

    def table(self) -> list[dict[str, Any]]:
        """A line for each penalty and setup: what is at lambda* and at lambda_Th, and the authors' numbers."""
        results = []
        for part in self.parts:
            for setup in self.settings.setups:
                best, theory = self.best(part.penalty, setup), self.at_theory(part.penalty, setup)
                printed = self.published(part.penalty, setup)
                if best is None:
                    continue
                results.append(
                    {
                        "penalty": part.penalty,
                        "setup": setup,
                        "lambda_best": best.strength,
                        "lambda_best_at_the_end_of_the_grid": self.at_end(best),
                        "accuracy_at_best": _pair(best.scores["accuracy"]),
                        "accuracy_at_theory": None if theory is None else _pair(theory.scores["accuracy"]),
                        "theory_over_best": 1.0 / best.ratio if setup == "bayesian" else None,
                        "log10_theory_over_best": -math.log10(best.ratio) if setup == "bayesian" else None,
                        "published": None if printed is None else asdict(printed),
                    }
                )
        return results

    def document(self) -> dict[str, Any]:
        """Every number of the study, ready for JSON."""
        settings = self.settings
        sparsest = [row for part in self.parts if (row := self.sparsest(part.penalty)) is not None]
        rows = [row for part in self.parts for setup in settings.setups for row in self.rows(part.penalty, setup)]
        return {
            "settings": settings.config(),
            **processor(settings.device),
            "inference": {part.penalty: repr(settings.inference(part.penalty, self.num_data)) for part in self.parts},
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
            "fits": [{**asdict(result.cell), **result.scores, "seconds": result.seconds} for result in self.results],
            "diverged": [asdict(cell) for cell in self.failed],
            "notes": self.notes(),
        }


def run(settings: Settings, folder: Path, report: Report = silent, rows: Rows | None = None) -> Study:
    """Run the study, or the part of it that `folder` does not hold yet; `report` is told a line about each fit.

    `rows` are what `read` gives, which is called without them. Lambdas, setups and seeds of a penalty train together,
    as members, in groups for which there is memory, or in so many that `settings.jobs` processes have one each.
    """
    rows, jobs = read(settings) if rows is None else rows, settings.jobs
    fingerprint = as_data(rows.train.pair).fingerprint()
    each = [
        Runs(problem(name, rows, settings), folder, settings, report, fingerprint, jobs) for name in settings.penalties
    ]
    cells = {runs: runs.cells() for runs in each}
    result: dict[Cell, Result[Cell]] = {}
    for runs, own in cells.items():
        result |= runs.stored(own)
    missing = {runs: [cell for cell in own if cell not in result] for runs, own in cells.items()}
    total = sum(map(len, missing.values()))
    most = None if jobs == 1 else max(1, math.ceil(total / jobs))
    groups = [(runs, group) for runs, own in missing.items() for group in runs.groups(cells[runs], own, most)]
    failed: list[Cell] = []
    work = {f"{runs.name}, group {i}": _work(runs, group, jobs) for i, (runs, group) in enumerate(groups, start=1)}
    for fits, lines in in_processes(work, jobs):
        for line in lines:
            report(line)
        for cell, fit in fits:
            if fit is None:
                failed.append(cell)
            else:
                result[cell] = fit
    for runs in each:
        runs.remove_checkpoints()
    parts = [
        Part(
            runs.name,
            {setup: runs.problem.ratios(setup, settings) for setup in settings.setups},
            {setup: dict(own) for setup, own in runs.problem.factors.items()},
            runs.problem.exchange,
        )
        for runs in each
    ]
    results = tuple(result[cell] for own in cells.values() for cell in own if cell in result)
    return Study(settings, len(rows.train), len(rows.held_out), tuple(parts), results, tuple(failed))


def _work(runs: Runs, group: Sequence[Cell], jobs: int) -> Callable[[], tuple[Fits, list[str]]]:
    if jobs == 1:
        return lambda: (list(runs.fitted(group)), [])
    return partial(fit_there, runs.settings, runs.name, group, runs.folder)


def _on_held_out(row: Row) -> tuple[float, float]:
    return row.scores["held_out_accuracy"][0], -row.scores["held_out_nll"][0]


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
    rows = table("penalty, setup", "lambda*", *columns)
    for line in lines:
        ratio = line["theory_over_best"]
        numbers = (_percent(line["accuracy_at_best"]), _percent(line["accuracy_at_theory"]))
        rows.add_row(_name(line), f"{line['lambda_best']:.2g}", *numbers, "" if ratio is None else f"{ratio:.3g}")
    out.print(rows)
    seeds = f"Mean ± standard deviation over {settings.seeds} seeds" if settings.seeds > 1 else "One seed"
    choice = f"lambda* has the best accuracy on {study.held_out:,} held-out training rows."
    remark(out, f"{seeds}. {choice}")
    if any(line["published"] for line in lines):
        title(out, "As the authors had it, with networks and settings of their own")
        rows = table("penalty, setup", *columns)
        for line in lines:
            rows.add_row(_name(line), *_published(line["published"]))
        out.print(rows)
    notes(out, study.notes())


def _name(line: dict[str, Any]) -> str:
    return f"{line['penalty']}, {line['setup']}"


def _percent(pair: dict[str, float | None] | None) -> str:
    if pair is None or pair["mean"] is None:
        return ""
    spread = pair["standard_deviation"]
    return f"{100 * pair['mean']:.2f}" + ("" if spread is None else f" ± {100 * spread:.2f}")


def _published(line: dict[str, float | None] | None) -> tuple[str, str, str]:
    if line is None:
        return "", "", ""
    theory, log_ratio = line["at_theory"], line["log_ratio"]
    return (
        f"{line['best']:.2f}",
        "" if theory is None else f"{theory:.2f}",
        "" if log_ratio is None else f"{10**log_ratio:.3g}",
    )
