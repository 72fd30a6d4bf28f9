"""The scores of predictions, as columns of tables and as JSON, with bootstrap intervals."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from posterity.cli.frame.options import LEVEL
from posterity.cli.frame.sources import Source
from posterity.datasets import DataSet
from posterity.metrics import (
    accuracy,
    auroc,
    average_precision,
    balanced_accuracy,
    bootstrap,
    brier_score,
    crps,
    expected_calibration_error,
    mean_absolute_error,
    negative_log_likelihood,
    r_squared,
    root_mean_squared_error,
)
from posterity.metrics.scores import mean_over_rows, per_row
from posterity.predictive import ClassPredictive, GaussianPredictive, Predictive
from posterity.report.numbers import number
from posterity.storage.part import JSON

ENTRIES = 4_000_000  # resampled rows of a score, at most; but always 400 resamples


def _scaled(value: float, scale: float) -> float:
    return value * scale


@dataclass(frozen=True)
class Column:
    """One score: its key in JSON, its heading, the metric, and whether lower values are better.

    - `wanted` is the ideal value of a score for which neither lower nor higher is better.
    - `rescaled` (value, scale) converts a score of targets divided by `scale` into the score of the targets.
    - `shows`: whether the short tables have it, of several methods or of one fit.
    - `resamples`: whether a bootstrap interval is valid; calibration errors are biased on repeated rows.
    """

    key: str
    heading: str
    metric: Callable[[Predictive, Tensor], float]
    lower_is_better: bool = True
    wanted: float | None = None
    rescaled: Callable[[float, float], float] = lambda value, scale: value
    shows: bool = True
    resamples: bool = True

    def shown(self, value: float | None) -> str:
        """Return the value as tables show it: four decimals, at least two significant digits."""
        power = math.floor(math.log10(abs(value))) if value and math.isfinite(value) else 0
        return number(value, 5 if power >= 0 else max(2, 5 + power))

    def interval(self, ends: Sequence[float] | None) -> str:
        """Return the ends of an interval as tables show them; "" for no interval."""
        return "" if ends is None else f"{self.shown(ends[0])} to {self.shown(ends[1])}"

    def worse(self, value: float) -> float:
        """Return a number that is lower for a better value."""
        if self.wanted is not None:
            return abs(value - self.wanted)
        return value if self.lower_is_better else -value


@mean_over_rows
def _crps(pred: Predictive, y: Tensor) -> Tensor:
    """Return the CRPS of each row, by samples for mixtures of more than 30 normals, whose pairs are expensive."""
    return crps.rows(pred, y, most_normals=30)


@lru_cache(maxsize=1)
def _interval(pred: Predictive, level: float) -> tuple[Tensor, Tensor]:
    """Return the central interval, cached for coverage and width: its ends may take seconds to find."""
    return pred.interval(level)


def _coverage(pred: Predictive, y: Tensor, level: float) -> Tensor:
    lower, upper = _interval(pred, level)
    targets = pred.check(y)
    return per_row((lower <= targets) & (targets <= upper), pred)


def _width(pred: Predictive, y: Tensor, level: float) -> Tensor:
    lower, upper = _interval(pred, level)
    return per_row(upper - lower, pred)


_CLASSES = (
    Column("test_nll", "test NLL", negative_log_likelihood),
    Column("ece", "ECE", expected_calibration_error, resamples=False),
    Column("accuracy", "accuracy", accuracy, lower_is_better=False),
    Column("auroc", "AUROC", auroc, lower_is_better=False),
    Column("average_precision", "PR-AUC", average_precision, lower_is_better=False, shows=False),
    Column("brier", "Brier", brier_score, shows=False),
    Column("balanced_accuracy", "balanced accuracy", balanced_accuracy, lower_is_better=False, shows=False),
)
_NUMBERS = (
    Column("test_nll", "test NLL", negative_log_likelihood, rescaled=lambda value, scale: value + math.log(scale)),
    Column("rmse", "RMSE", root_mean_squared_error, rescaled=_scaled),
    Column("mae", "MAE", mean_absolute_error, rescaled=_scaled, shows=False),
    Column("r2", "R2", r_squared, lower_is_better=False),
    Column("crps", "CRPS", _crps, rescaled=_scaled, shows=False),
)


@lru_cache(maxsize=8)
def _at_level(level: float) -> tuple[Column, ...]:
    """Return the columns for coverage and width of central intervals of this level."""
    coverage, width = (mean_over_rows(lambda pred, y, rows=rows: rows(pred, y, level)) for rows in (_coverage, _width))
    at = "" if level == LEVEL else f" at {100 * level:g} %"
    return (
        Column("coverage", f"coverage{at}", coverage, wanted=level),
        Column("width", f"interval width{at}", width, rescaled=_scaled, shows=False),
    )


def all_columns(data: DataSet, level: float = LEVEL) -> tuple[Column, ...]:
    """Return all scores for this task; coverage and width are of intervals of this level."""
    return _CLASSES if data.task == "classification" else (*_NUMBERS, *_at_level(level))


def columns(data: DataSet) -> tuple[Column, ...]:
    """Return the scores of the short tables."""
    return tuple(column for column in all_columns(data) if column.shows)


def scores(predictive: Predictive, source: Source) -> dict[str, float | None]:
    """Return all scores at the test rows by key, in units of the file if there is one.

    A score that is not defined is None, such as the AUROC of rows of one class.
    """
    predictive, targets, scale = source.own_units(predictive)
    return {
        column.key: _known(column.rescaled(column.metric(predictive, targets), scale))
        for column in all_columns(source.data)
    }


def scores_and_intervals(
    predictive: Predictive, source: Source, level: float = LEVEL
) -> tuple[dict[str, float | None], dict[str, list[float] | None]]:
    """Return `scores` and the bootstrap interval of each over the test rows, None where it has none.

    Coverage and width are of central intervals of this level.
    """
    predictive, targets, scale = source.own_units(predictive)
    resamples = min(1000, max(400, ENTRIES // len(targets)))
    values: dict[str, float | None] = {}
    ends: dict[str, list[float] | None] = {}
    for column in all_columns(source.data, level):
        if not column.resamples or len(targets) < 2:
            values[column.key] = _known(column.rescaled(column.metric(predictive, targets), scale))
            ends[column.key] = None
            continue
        value, *both = (
            column.rescaled(number, scale)
            for number in bootstrap(column.metric, predictive, targets, LEVEL, resamples=resamples)
        )
        values[column.key] = _known(value)
        ends[column.key] = both if all(map(math.isfinite, both)) else None
    return values, ends


def pooled_scores(parts: Sequence[tuple[Predictive, Tensor]], data: DataSet) -> tuple[dict[str, JSON], dict[str, JSON]]:
    """Return the scores of the rows of all parts (predictive, targets) together, and their bootstrap intervals.

    All parts are in the same units. Scores without a valid bootstrap, or that are not defined, are left out.
    """
    targets = torch.cat([y.cpu() for _, y in parts])
    means = torch.cat([pred.mean.double().cpu() for pred, _ in parts])
    pooled: Predictive = (  # scores that are not means over rows depend only on the predicted means
        ClassPredictive(means) if parts[0][0].classifies else GaussianPredictive(means, 0.0 * means, means.new_ones(1))
    )
    values: dict[str, JSON] = {}
    ends: dict[str, JSON] = {}
    for column in all_columns(data):
        if not column.resamples:
            continue
        metric: Any = column.metric
        if hasattr(metric, "rows"):
            rows = torch.cat([metric.rows(pred, y).double().cpu() for pred, y in parts])
            metric = mean_over_rows(lambda p, y, rows=rows: rows, metric.of_mean)
        value, *both = bootstrap(metric, pooled, targets, LEVEL)
        if math.isfinite(value):
            values[column.key] = value
            ends[column.key] = [*both] if all(map(math.isfinite, both)) else None
    return values, ends


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


def nll_rows(predictive: Predictive, source: Source) -> Tensor:
    """Return the NLL of each test row, (N,), in units of the file if there is one."""
    predictive, targets, scale = source.own_units(predictive)
    return negative_log_likelihood.rows(predictive, targets) + math.log(scale)


BY_DEFINITION = (("frequencies", "ece"), ("mean", "coverage"))
"""Baselines that are calibrated by construction, with the score for which they are not ranked."""


def best(rows: Mapping[str, Mapping[str, float | None]], data: DataSet) -> dict[str, tuple[str, ...]]:
    """Return for each score of the short table the rows with the best shown value; none if all show the same."""
    winning = {}
    for column in columns(data):
        values = {
            name: round(column.worse(float(column.shown(row[column.key]).replace(",", ""))), 12)
            for name, row in rows.items()
            if row.get(column.key) is not None and (name, column.key) not in BY_DEFINITION
        }
        goal = min(values.values(), default=0.0)
        winners = tuple(name for name, value in values.items() if value == goal)
        winning[column.key] = winners if len(winners) < len(values) else ()
    return winning
