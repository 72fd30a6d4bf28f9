"""The door of every metric: rows that can be scored, and their mean."""

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, Protocol, cast

import torch
from torch import Tensor

from posterity.errors import BadData, shown
from posterity.predictive.predictive import Predictive

Arguments = ParamSpec("Arguments")


class RowMetric(Protocol[Arguments]):
    """A metric `metric(pred, y) -> float` that is the mean over rows of `metric.rows(pred, y)`, (N,)."""

    rows: Callable[Arguments, Tensor]

    def __call__(self, *args: Arguments.args, **kwargs: Arguments.kwargs) -> float:
        """The mean of `rows`."""


def mean_over_rows(rows: Callable[Arguments, Tensor]) -> RowMetric[Arguments]:
    """The metric whose value is the mean of the scores (N,) that `rows(pred, y)` gives.

    The scores themselves stay within reach as `metric.rows(pred, y)`, for bootstrap intervals and paired comparisons.
    """

    @functools.wraps(rows)
    def metric(*args: Arguments.args, **kwargs: Arguments.kwargs) -> float:
        return float(rows(*args, **kwargs).double().mean())

    metric.__signature__ = inspect.signature(rows).replace(return_annotation=float)  # type: ignore[attr-defined]
    metric.rows = rows  # type: ignore[attr-defined]
    return cast(RowMetric[Arguments], metric)


def scored(metric: str, pred: Predictive, y: Tensor) -> Tensor:
    """The targets lined up with the predictive's rows; BadData where there are none or they do not fit."""
    targets = pred.check(y)
    if not len(pred):
        raise BadData(f"{metric} needs at least one row. Got none. Check how the data were split or filtered.")
    return targets


def labelled(
    metric: str, pred: Predictive, y: Tensor, instead: str = "negative_log_likelihood"
) -> tuple[Tensor, Tensor]:
    """Probabilities (R, C) in float64 and labels (R,) of all rows and positions; a TypeError for a regression."""
    classification(metric, pred, instead)
    labels = scored(metric, pred, y)
    return by_label(pred.probs), labels.reshape(-1)


def by_label(probs: Tensor) -> Tensor:
    """Probabilities (N, C, *positions) as (R, C) in float64, one row for each label."""
    return probs.double().movedim(1, -1).reshape(-1, probs.shape[1])


def per_row(scores: Tensor, pred: Predictive) -> Tensor:
    """The mean score of each row, (N,), from scores of all its labels or outputs."""
    return scores.reshape(len(pred), -1).double().mean(-1)


def classification(metric: str, pred: Predictive, instead: str) -> None:
    """Raise a TypeError unless the predictive has class probabilities."""
    if not pred.classifies:
        raise TypeError(f"{metric} needs a classification predictive. Got {type(pred).__name__}. Use {instead}.")


def regression(metric: str, pred: Predictive, instead: str) -> None:
    """Raise a TypeError unless the targets are numbers."""
    if pred.classifies:
        raise TypeError(f"{metric} needs a regression predictive. Got {type(pred).__name__}. Use {instead}.")


def whole_number(name: str, value: object, least: int = 1) -> None:
    """Raise a ValueError unless the value is an integer from `least` up."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        wanted = "a positive integer" if least == 1 else f"an integer from {least} up"
        raise ValueError(f"{name} must be {wanted}. Got {shown(value)}.")


def probabilities(metric: str, reference: Tensor, like: Tensor) -> Tensor:
    """Reference probabilities with the shape, dtype and device of `like` (N, C, *positions), or BadData."""
    reference = torch.as_tensor(reference).to(like)
    if reference.shape != like.shape:
        raise BadData(
            f"{metric}: the reference must have the shape {tuple(like.shape)} of the probabilities. "
            f"Got {tuple(reference.shape)}. Give class probabilities of the same rows."
        )
    if not bool(((reference >= 0) & ((reference.sum(1, keepdim=True) - 1).abs() < 1e-3)).all()):
        raise BadData(
            f"{metric}: the reference must hold probabilities that sum to 1. Got {shown(reference)}. "
            "Give probabilities, not logits or labels."
        )
    return reference
