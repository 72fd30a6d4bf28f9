"""The numbers by which methods are compared on the test rows."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from posterity.datasets import DataSet
from posterity.metrics import accuracy, expected_calibration_error, negative_log_likelihood, root_mean_squared_error
from posterity.posteriors import Posterior
from posterity.predictive.predictive import Predictive


@dataclass(frozen=True)
class Column:
    """One score: its key in JSON, its heading, the metric, and whether less of it is better."""

    key: str
    heading: str
    metric: Callable[[Predictive, Tensor], float]
    lower_is_better: bool = True

    def shown(self, value: float) -> str:
        """The value as tables show it."""
        return f"{value:.4f}"


_CLASSES = (
    Column("test_nll", "test NLL", negative_log_likelihood),
    Column("ece", "ECE", expected_calibration_error),
    Column("accuracy", "accuracy", accuracy, lower_is_better=False),
)
_NUMBERS = (
    Column("test_nll", "test NLL", negative_log_likelihood),
    Column("rmse", "RMSE", root_mean_squared_error),
)


def columns(data: DataSet) -> tuple[Column, ...]:
    """The scores that suit the data."""
    return _CLASSES if data.task == "classification" else _NUMBERS


def scores(posterior: Posterior, data: DataSet) -> dict[str, float]:
    """Every score on the test rows, by key."""
    predictive = posterior.predict(data.test.inputs)
    return {column.key: column.metric(predictive, data.test.targets) for column in columns(data)}


def best(rows: Mapping[str, Mapping[str, float]], data: DataSet) -> dict[str, tuple[str, ...]]:
    """For each score, the names of the rows that are best as shown; none where all rows show the same."""
    found = {}
    for column in columns(data):
        values = {name: float(column.shown(row[column.key])) for name, row in rows.items()}
        goal = min(values.values()) if column.lower_is_better else max(values.values())
        winners = tuple(name for name, value in values.items() if value == goal)
        found[column.key] = winners if len(winners) < len(rows) else ()
    return found
