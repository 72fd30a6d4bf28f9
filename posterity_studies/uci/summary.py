"""Means and standard errors over splits, beside the results that others published on the same splits."""

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

from posterity.datasets.files import content, data_places
from posterity.errors import BadData
from posterity.inference.sweep import Result
from posterity_studies.results import with_error
from posterity_studies.uci.recipes import RECIPES
from posterity_studies.uci.runs import Cell

FILE = "published_results.csv"
PUBLISHED_METRICS = {"test_rmse": ("test_rmse", 1.0), "test_ll": ("test_nll", -1.0), "test_nll": ("test_nll", 1.0)}
GOAL = "MC dropout, 1 hidden layer, grid search 2018 (MC average)"
ENSEMBLES = "Deep ensembles (M=5, 40 epochs, 1x50 ReLU; 1x100 for protein)"
COMPARED = {
    GOAL: "MC dropout 2018",
    ENSEMBLES: "Deep ensembles",
    "PBP (Hernandez-Lobato & Adams 2015)": "PBP",
    "VI (Graves 2011)": "VI (Graves)",
}
"""The methods with the same network that tables and figures show, with short names; results.json has all."""

PAIRS = {"dropout": GOAL, "ensemble": ENSEMBLES}
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
    return next((place / FILE for place in data_places() if (place / FILE).is_file()), None)


def read_published(path: Path, data_sets: Sequence[str]) -> tuple[Value, ...]:
    """The RMSE and (with its sign turned where it is a log-likelihood) NLL rows of these data sets, in file order."""
    table = csv.DictReader(io.StringIO(content(path).decode()), strict=True)
    wanted = ("dataset", "method", "metric", "mean", "std_err", "source")
    if missing := [name for name in wanted if name not in (table.fieldnames or ())]:
        raise BadData(f"{path}: it must have the columns {', '.join(wanted)}. {', '.join(missing)} is missing.")
    found = []
    for row in table:
        if row["dataset"] not in data_sets or row["metric"] not in PUBLISHED_METRICS:
            continue
        metric, sign = PUBLISHED_METRICS[row["metric"]]
        where = f"{path}: line {table.line_num}"
        error = _number(row["std_err"], where) if row["std_err"] else None
        mean = sign * _number(row["mean"], where)
        found.append(Value(row["dataset"], row["method"], metric, mean, error, row["source"]))
    return tuple(found)


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
            {metric: mean_and_error([one.scores[metric] for one in group]) for metric in METRICS},
            len(group),
            sum(one.seconds for one in group),
        )
        for (data_set, method), group in groups.items()
    ]


def published_rows(values: Sequence[Value], data_set: str) -> list[Row]:
    """The methods to compare with, under their short names."""
    found = []
    for method, label in COMPARED.items():
        scores = {
            value.metric: Mean(value.mean, value.error)
            for value in values
            if (value.data_set, value.method) == (data_set, method)
        }
        if scores:
            found.append(Row(data_set, label, scores))
    return found


def at_least_as_good(rows: Sequence[Row], label: str) -> tuple[list[str], list[str]]:
    """The data sets on which the NLL of our method `label` is at least as good as the goal's, and all compared."""
    goal = {row.data_set: row.scores["test_nll"].mean for row in rows if row.published and row.method == COMPARED[GOAL]}
    own = {row.data_set: row.scores["test_nll"].mean for row in rows if not row.published and row.method == label}
    compared = [name for name in own if name in goal]
    return [name for name in compared if own[name] <= goal[name]], compared


def reached(rows: Sequence[Row], label: str, goal: str, metric: str) -> tuple[list[str], list[str]]:
    """The data sets where our `label` is at most one standard error worse than the published `goal`; all compared.

    The standard error is that of the published mean, or our own where none is stated.
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
