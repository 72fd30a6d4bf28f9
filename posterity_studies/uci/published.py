"""Published results on the same splits, from `published_results.csv`."""

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from posterity.datasets.files import content, data_places
from posterity.errors import BadData

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
