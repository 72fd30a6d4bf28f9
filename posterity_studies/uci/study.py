"""The study as a whole: which fits are missing, the fits, and the numbers as one document."""

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from posterity.cli.frame.output import table
from posterity.datasets.files import content, data_places
from posterity.datasets.uci import num_splits
from posterity.errors import BadData
from posterity.inference.sweep import Result
from posterity_studies.frame import add_heading, notes, remark, title
from posterity_studies.options import Report, silent
from posterity_studies.rows import with_error
from posterity_studies.uci.recipes import RECIPES
from posterity_studies.uci.runs import Cell, fit_all, stored, together
from posterity_studies.uci.settings import Settings

FILE = "published_results.csv"
PUBLISHED_METRICS = {"test_rmse": ("test_rmse", 1.0), "test_ll": ("test_nll", -1.0), "test_nll": ("test_nll", 1.0)}
GOAL = "MC dropout, 1 hidden layer, grid search 2018 (MC average)"
ENSEMBLES = "Deep ensembles (M=5, 40 epochs, 1x50 ReLU; 1x100 for protein)"
PBP = "PBP (Hernandez-Lobato & Adams 2015)"
COMPARED = {GOAL: "MC dropout 2018", ENSEMBLES: "Deep ensembles", PBP: "PBP 2015", "VI (Graves 2011)": "VI (Graves)"}
"""The methods with the same network that tables and figures show, with short names; results.json has all."""

PAIRS = {"dropout": GOAL, "ensemble": ENSEMBLES, "pbp": PBP}
"""Methods of the study, and the published runs of the same."""


@dataclass(frozen=True)
class Value:
    """A published mean, as RMSE or negative log-likelihood in the units of the target; `error` None: not stated."""

    data_set: str
    method: str
    metric: str
    mean: float
    error: float | None
    source: str


def find_published() -> Path | None:
    """The file with the published results where data sets are looked for, or None."""
    return next((index / FILE for index in data_places() if (index / FILE).is_file()), None)


def read_published(path: Path, data_sets: Sequence[str]) -> tuple[Value, ...]:
    """The RMSE and (with its sign turned where it is a log-likelihood) NLL rows of these data sets, in file order."""
    table = csv.DictReader(io.StringIO(content(path).decode()), strict=True)
    wanted = ("dataset", "method", "metric", "mean", "std_err", "source")
    if missing := [name for name in wanted if name not in (table.fieldnames or ())]:
        raise BadData(f"{path}: it must have the columns {', '.join(wanted)}. {', '.join(missing)} is missing.")
    results = []
    for row in table:
        if row["dataset"] not in data_sets or row["metric"] not in PUBLISHED_METRICS:
            continue
        metric, sign = PUBLISHED_METRICS[row["metric"]]
        where = f"{path}: line {table.line_num}"
        error = _number(row["std_err"], where) if row["std_err"] else None
        mean = sign * _number(row["mean"], where)
        results.append(Value(row["dataset"], row["method"], metric, mean, error, row["source"]))
    return tuple(results)


def _number(text: str, where: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise BadData(f"{where}: mean and std_err must be numbers. Got '{text}'. Fetch the file again.")
    return value


METRICS = {"test_rmse": "RMSE", "test_nll": "NLL"}


@dataclass(frozen=True)
class Mean:
    """A mean over splits and its standard error, None where it is not known."""

    mean: float
    error: float | None

    def __str__(self) -> str:
        """Both, to the second digit of the error: 0.07890 ± 0.00060."""
        return with_error(self.mean, self.error)


@dataclass(frozen=True)
class Row:
    """One method on one data set, of this study (with its number of splits and seconds) or published."""

    data_set: str
    method: str
    scores: dict[str, Mean]
    splits: int | None = None
    seconds: float | None = None

    @property
    def published(self) -> bool:
        """Whether others computed it."""
        return self.splits is None


def mean_and_error(values: Sequence[float]) -> Mean:
    """The mean, and the standard error: the sample standard deviation over the square root of the number.

    The splits share training rows, so that it is the spread over splits that the literature reports, no more.

    >>> mean_and_error([1.0, 2.0, 3.0])
    Mean(mean=2.0, error=0.5773502691896258)
    """
    return Mean(fmean(values), stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None)


def own_rows(results: Sequence[Result[Cell]]) -> list[Row]:
    """A row for each data set and method, in the order of the results."""
    groups: dict[tuple[str, str], list[Result[Cell]]] = {}
    for result in results:
        groups.setdefault((result.cell.data_set, result.cell.method), []).append(result)
    return [
        Row(
            data_set,
            RECIPES[method].label,
            {metric: mean_and_error([result.scores[metric] for result in group]) for metric in METRICS},
            len(group),
            sum(result.seconds for result in group),
        )
        for (data_set, method), group in groups.items()
    ]


def published_rows(values: Sequence[Value], data_set: str) -> list[Row]:
    """The methods to compare with, under their short names."""
    results = []
    for method, label in COMPARED.items():
        scores = {
            value.metric: Mean(value.mean, value.error)
            for value in values
            if (value.data_set, value.method) == (data_set, method)
        }
        if scores:
            results.append(Row(data_set, label, scores))
    return results


def at_least_as_good(rows: Sequence[Row], label: str) -> tuple[list[str], list[str]]:
    """The data sets on which the NLL of our method `label` is at least as good as the goal's, and all compared."""
    goal = {row.data_set: row.scores["test_nll"].mean for row in rows if row.published and row.method == COMPARED[GOAL]}
    own = {row.data_set: row.scores["test_nll"].mean for row in rows if not row.published and row.method == label}
    compared = [name for name in own if name in goal]
    return [name for name in compared if own[name] <= goal[name]], compared


def reached(rows: Sequence[Row], label: str, goal: str, metric: str) -> tuple[list[str], list[str]]:
    """The data sets where our `label` is at most one standard error worse than the published `goal`; all compared.

    The standard error belongs to the published mean, or is our own where none is stated.
    """
    goals = {
        row.data_set: row.scores[metric]
        for row in rows
        if row.published and row.method == goal and metric in row.scores
    }
    own = {row.data_set: row.scores[metric] for row in rows if not row.published and row.method == label}
    compared = [name for name in own if name in goals]
    good = []
    for name in compared:
        error = own[name].error if goals[name].error is None else goals[name].error
        if own[name].mean <= goals[name].mean + (error or 0.0):
            good.append(name)
    return good, compared


@dataclass(frozen=True)
class Study:
    """All that the study found: a result for each data set, method and split, and what others published."""

    settings: Settings
    results: tuple[Result[Cell], ...]
    published: tuple[Value, ...]
    published_from: Path | None

    @property
    def data_sets(self) -> tuple[str, ...]:
        """The names of the data sets, in order."""
        return tuple(dict.fromkeys(result.cell.data_set for result in self.results))

    @property
    def rows(self) -> list[Row]:
        """Data set by data set, our methods and then the published ones to compare with."""
        own = own_rows(self.results)
        return [
            row
            for name in self.data_sets
            for row in (*(row for row in own if row.data_set == name), *published_rows(self.published, name))
        ]

    def notes(self) -> list[str]:
        """For each of our methods, a sentence on how its NLL compares with the published goal; or that none is here."""
        if self.published_from is None:
            return [f"{FILE} was not found where data sets are looked for: no published results to compare with."]
        rows, result = self.rows, []
        for label in dict.fromkeys(row.method for row in rows if not row.published):
            good, compared = at_least_as_good(rows, label)
            if compared:
                names = f" ({', '.join(good)})" if good else ""
                result.append(
                    f"{label}: NLL at least as good as {COMPARED[GOAL]} on {len(good)} of {len(compared)}{names}"
                )
        return result + [line for name, goal in PAIRS.items() for line in self._reached(RECIPES[name].label, goal)]

    def _reached(self, label: str, goal: str) -> list[str]:
        """A sentence for each metric on where our method comes within a standard error of the one it follows."""
        results = []
        for metric, name in METRICS.items():
            good, compared = reached(self.rows, label, COMPARED[goal], metric)
            if compared:
                names = f" ({', '.join(good)})" if good else ""
                results.append(
                    f"{label}: {name} within one standard error of {COMPARED[goal]}, or better, on "
                    f"{len(good)} of {len(compared)}{names}"
                )
        return results

    def document(self) -> dict[str, Any]:
        """Every number of the study, ready for JSON."""
        return {
            "settings": self.settings.config(),
            "methods": [asdict(row) for row in own_rows(self.results)],
            "splits": [{**asdict(result.cell), **result.scores, "seconds": result.seconds} for result in self.results],
            "published": [asdict(value) for value in self.published],
            "published_from": None if self.published_from is None else self.published_from.name,
            "notes": self.notes(),
        }


def run(settings: Settings, folder: Path, report: Report = silent) -> Study:
    """Run the study, or the part of it that `folder` does not hold yet.

    `report` is told a line about each split. Results that were made with other settings are refused.
    """
    published_from = find_published()
    published = () if published_from is None else read_published(published_from, settings.datasets)
    cells = [
        Cell(name, method, split)
        for name in dict.fromkeys(settings.datasets)
        for split in range(min(settings.splits or num_splits(name), num_splits(name)))
        for method in dict.fromkeys(settings.methods)
    ]
    done = {result.cell: result for result in stored(cells, folder, settings)}
    missing = [cell for cell in cells if cell not in done]
    pieces = together(missing)
    if done:
        report(f"{len(done)} of {len(cells)} results are there already")
    for count, results in enumerate(fit_all(pieces, folder, settings), start=1):
        done.update({result.cell: result for result in results})
        report(_progress(results, count, len(pieces)))
    return Study(settings, tuple(done[cell] for cell in cells), published, published_from)


def _progress(results: Sequence[Result[Cell]], count: int, whole: int) -> str:
    cell = results[0].cell
    splits = len({result.cell.split for result in results})
    which = f"split {cell.split}" if splits == 1 else f"{splits} splits"
    scores = ", ".join(
        f"{row.method} NLL {row.scores['test_nll'].mean:.4g} RMSE {row.scores['test_rmse'].mean:.4g}"
        for row in own_rows(results)
    )
    seconds = max(result.seconds for result in results) * splits
    return f"{count}/{whole} {cell.data_set} {which}: {scores}, {seconds:.1f} s"


def show(out: Any, study: Study) -> None:
    """Print the tables."""
    title(out, "Standard UCI regression splits, one hidden layer")
    rows = table("", *METRICS.values(), "splits", wrap=False)
    for data_set, part in groupby(study.rows, lambda row: row.data_set):
        add_heading(rows, data_set)
        for row in part:
            scores = (str(row.scores.get(metric, "")) for metric in METRICS)
            splits = "" if row.published else str(row.splits)
            rows.add_row(f"  {row.method}", *scores, splits, style="dim" if row.published else "")
    out.print(rows)
    remark(out, "Mean ± standard error over splits, in units of the target. Dim: published.")
    notes(out, study.notes())
