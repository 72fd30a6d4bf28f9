"""The scores of predictions, as columns of tables and as JSON."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from posterity.cli.frame.sources import Source
from posterity.datasets import DataSet
from posterity.metrics import accuracy, expected_calibration_error, negative_log_likelihood, root_mean_squared_error
from posterity.predictive.predictive import Predictive


@dataclass(frozen=True)
class Column:
    """One score: its key in JSON, its heading, the metric, and whether less of it is better.

    `rescaled` turns its value for targets that were divided by a scale into that for the targets themselves.
    """

    key: str
    heading: str
    metric: Callable[[Predictive, Tensor], float]
    lower_is_better: bool = True
    rescaled: Callable[[float, float], float] = lambda value, scale: value

    def shown(self, value: float) -> str:
        """The value as tables show it."""
        return f"{value:.4f}" if value == 0 or abs(value) >= 0.01 else f"{value:.3g}"


_CLASSES = (
    Column("test_nll", "test NLL", negative_log_likelihood),
    Column("ece", "ECE", expected_calibration_error),
    Column("accuracy", "accuracy", accuracy, lower_is_better=False),
)
_NUMBERS = (
    Column("test_nll", "test NLL", negative_log_likelihood, rescaled=lambda value, scale: value + math.log(scale)),
    Column("rmse", "RMSE", root_mean_squared_error, rescaled=lambda value, scale: value * scale),
)


def columns(data: DataSet) -> tuple[Column, ...]:
    """The scores that suit the data."""
    return _CLASSES if data.task == "classification" else _NUMBERS


def scores(predictive: Predictive, source: Source) -> dict[str, float]:
    """Every score of predictions at the test rows, by key, in the units of the file if they come from one."""
    predictive, targets, scale = source.own_units(predictive)
    return {column.key: column.rescaled(column.metric(predictive, targets), scale) for column in columns(source.data)}


def nll_rows(predictive: Predictive, source: Source) -> Tensor:
    """The NLL of each test row, (N,), in the units of the file if they come from one."""
    predictive, targets, scale = source.own_units(predictive)
    return negative_log_likelihood.rows(predictive, targets) + math.log(scale)


def best(rows: Mapping[str, Mapping[str, float]], data: DataSet) -> dict[str, tuple[str, ...]]:
    """For each score, the names of the rows that are best as shown; none where all rows show the same.

    The frequencies of the classes are calibrated by what they are, and do not compete for ECE.
    """
    winning = {}
    for column in columns(data):
        values = {
            name: float(column.shown(row[column.key]))
            for name, row in rows.items()
            if (name, column.key) != ("frequencies", "ece")
        }
        goal = min(values.values()) if column.lower_is_better else max(values.values())
        winners = tuple(name for name, value in values.items() if value == goal)
        winning[column.key] = winners if len(winners) < len(values) else ()
    return winning
