"""Bootstrap intervals of a metric over the test rows."""

import itertools
import math
from collections.abc import Callable, Iterable
from statistics import NormalDist
from typing import NamedTuple

import torch
from torch import Tensor

from posterity.errors import BadData
from posterity.metrics.scores import whole_number
from posterity.numerics.random import Key
from posterity.predictive.predictive import Predictive, between_zero_and_one

_ENTRIES = 4_000_000  # of resampled rows at a time: bounds the memory
_GROUPS = 100  # of rows that are left out in turn
_LEAST_ERROR = (
    0.3  # share of the rows' standard error that resamples have in their lower tail: with less, few rows carry it
)
_NORMAL = NormalDist()


class Bootstrap(NamedTuple):
    """A metric's value with the ends of its bootstrap interval."""

    value: float
    lower: float
    upper: float


def bootstrap(
    metric: Callable[[Predictive, Tensor], float],
    pred: Predictive,
    y: Tensor,
    level: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
) -> Bootstrap:
    """A metric with a bootstrap interval from `resamples` draws of the N rows with replacement.

    **Math**: a metric that is a mean over rows (`metric.rows`), or a function of one (`metric.of_mean`), has the
    studentised interval: with mean m and standard error s of the rows, m* and s* of a resample, and quantiles q of
    t* = (m* - m) / s*, it is m - q_high s .. m - q_low s, within the range of the rows. Other metrics, rows of two
    values (accuracy), and rows of which a few carry all of s (errors of a nearly sure classifier; resamples without
    them have s* near 0, and no limit above) have the bias-corrected and accelerated (BCa) interval, from a jackknife.
    Resamples on which a metric is not defined (AUROC of one class) are left out.

    **Limit**: covers the choice of test rows, not of training rows or seed. Of 60 rows a 95 % interval covers 95 % for
    the NLL or RMSE of normal residuals, 92 % for residuals of a Student t with 8 degrees of freedom. Of rows without a
    single large error no interval can tell how rare these are. Not valid for metrics that are biased on repeated rows
    (calibration errors, upwards).

    **Cost**: one call of the metric where it has rows or takes weights of rows (`metric.weighted`), else one for each
    resample and at most 100 for the jackknife.

    **References**: Efron (1987), Better bootstrap confidence intervals; Hall (1988), Theoretical comparison of
    bootstrap confidence intervals.

    >>> from posterity.metrics import accuracy
    >>> from posterity.predictive.classes import ClassPredictive
    >>> pred = ClassPredictive(torch.tensor([[0.9, 0.1]] * 100))
    >>> value, lower, upper = bootstrap(accuracy, pred, torch.tensor([0] * 80 + [1] * 20))
    >>> value, round(lower, 2), round(upper, 2)  # about 0.8 -+ 2 sqrt(0.8 * 0.2 / 100)
    (0.8, 0.71, 0.87)
    """
    between_zero_and_one("bootstrap: level", level)
    whole_number("bootstrap: resamples", resamples, least=2)
    count, key = len(pred), Key(seed)
    if not count:
        raise BadData("bootstrap needs at least one row. Got none. Check how the data were split or filtered.")
    rows: Callable[[Predictive, Tensor], Tensor] | None = getattr(metric, "rows", None)
    tails = 0.5 * (1.0 - level), 0.5 * (1.0 + level)
    if rows is None:
        value, y = metric(pred, y), torch.as_tensor(y)
        everything = torch.arange(count, device="cpu")
        weighted: Callable[[Predictive, Tensor, Tensor], Tensor] | None = getattr(metric, "weighted", None)
        chosen = (_chosen(1, count, key.fold(number))[0] for number in range(resamples))
        groups = everything.tensor_split(min(count, _GROUPS))
        without = (everything[torch.isin(everything, group, invert=True)] for group in groups)
        if weighted is None:
            values, left = (_scores(metric, pred, y, index) for index in (chosen, without))
        else:
            values, left = (_weighted_scores(weighted, pred, y, index) for index in (chosen, without))
        left = left if count > 1 else values.new_full((1,), value)
        return Bootstrap(value, *_accelerated(values[~values.isnan()], value, left[~left.isnan()], tails))
    scores, of_mean = rows(pred, y).double().cpu(), metric.of_mean  # type: ignore[attr-defined]
    value = of_mean(float(scores.mean()))
    means, errors = _resampled(scores, resamples, key)
    count = len(scores)  # without rows whose targets are all missing
    mean, error = float(scores.mean()), float(scores.std()) / math.sqrt(count) if count > 1 else 0.0
    two_values = bool(((scores == scores.min()) | (scores == scores.max())).all())
    if two_values or not math.isfinite(error) or _quantiles(errors, tails)[0] < _LEAST_ERROR * error:
        left = (scores.sum() - scores) / max(1, count - 1)
        ends = _accelerated(means, mean, left, tails)
    else:
        ratios = (means - mean) / errors  # not finite where a resample has one row only, again and again
        low, high = _quantiles(ratios.nan_to_num(0.0, torch.inf, -torch.inf), tails)
        least, most = float(scores.min()), float(scores.max())
        ends = max(least, mean - high * error), min(most, mean - low * error)
    return Bootstrap(value, of_mean(ends[0]), of_mean(ends[1]))


def _scores(
    metric: Callable[[Predictive, Tensor], float], pred: Predictive, y: Tensor, chosen: Iterable[Tensor]
) -> Tensor:
    """The metric on each choice of rows."""
    values = [metric(pred.rows(index), y[index.to(y.device)]) for index in chosen]
    return torch.tensor(values, dtype=torch.float64, device="cpu")


def _weighted_scores(
    weighted: Callable[[Predictive, Tensor, Tensor], Tensor], pred: Predictive, y: Tensor, chosen: Iterable[Tensor]
) -> Tensor:
    """The metric on each choice of rows, by the number of times that each row was chosen."""
    count = len(pred)
    counts = (torch.bincount(index, minlength=count).double() for index in chosen)
    parts = []
    while together := list(itertools.islice(counts, max(1, _ENTRIES // count))):
        parts.append(weighted(pred, y, torch.stack(together)))
    return torch.cat(parts)


def _resampled(scores: Tensor, resamples: int, key: Key) -> tuple[Tensor, Tensor]:
    """Means of resampled scores, and their standard errors, (resamples,)."""
    count, parts = len(scores), []
    together = max(1, _ENTRIES // count)
    for low in range(0, resamples, together):
        drawn = scores[_chosen(min(together, resamples - low), count, key.fold(low))]
        mean = drawn.mean(-1)
        square = (drawn - mean.unsqueeze(-1)).square().sum(-1) / max(1, count - 1)
        parts.append(torch.stack([mean, (square / count).sqrt()]))
    means, errors = torch.cat(parts, dim=1)
    return means, errors


def _quantiles(values: Tensor, levels: tuple[float, float]) -> tuple[float, float]:
    """Values at these levels, the lower rounded down and the upper up."""
    ordered, last = values.sort().values, len(values) - 1
    low, high = (min(max(level, 0.0), 1.0) * last for level in levels)
    return float(ordered[math.floor(low)]), float(ordered[math.ceil(high)])


def _accelerated(values: Tensor, value: float, left: Tensor, tails: tuple[float, float]) -> tuple[float, float]:
    """The BCa interval from values of resamples, and values with a row or a group of rows `left` out.

    It is the percentile interval where the value is not finite, or the resamples do not differ.
    """
    if math.isnan(value):
        return math.nan, math.nan
    share = float((values < value).double().mean() + 0.5 * (values == value).double().mean())
    away = left.mean() - left
    scatter = float(away.square().sum())
    if not math.isfinite(value) or not 0.0 < share < 1.0 or not 0.0 < scatter < math.inf:
        return _quantiles(values, tails)
    bias, acceleration = _NORMAL.inv_cdf(share), float(away.pow(3).sum()) / (6.0 * scatter**1.5)
    moved = [bias + _NORMAL.inv_cdf(tail) for tail in tails]
    low, high = (_NORMAL.cdf(bias + at / max(1e-3, 1.0 - acceleration * at)) for at in moved)
    return _quantiles(values, (low, high))


def _chosen(resamples: int, count: int, key: Key) -> Tensor:
    """Draw rows with replacement, (resamples, count)."""
    return torch.randint(count, (resamples, count), generator=key.generator("cpu"), device="cpu")
