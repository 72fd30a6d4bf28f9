"""Bootstrap intervals of a metric over the test rows."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from posterity.errors import BadData
from posterity.metrics.scores import whole_number
from posterity.numerics.random import Key
from posterity.predictive.predictive import Predictive, between_zero_and_one

_ENTRIES = 4_000_000  # of resampled rows at a time: bounds the memory


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
    """A metric with the percentile interval of its values on `resamples` draws of the N rows with replacement.

    **Limit**: covers the choice of test rows, not of training rows or seed. Too narrow for few rows (fewer than
    30, say); not valid for metrics that are biased on repeated rows (calibration errors, upwards).

    **Cost**: one call of the metric where it is a mean over rows (`metric.rows`), else one for each resample.

    **References**: Efron (1979), Bootstrap methods: another look at the jackknife.

    >>> from posterity.metrics import accuracy
    >>> from posterity.predictive.classes import ClassPredictive
    >>> pred = ClassPredictive(torch.tensor([[0.9, 0.1]] * 100))
    >>> value, lower, upper = bootstrap(accuracy, pred, torch.tensor([0] * 80 + [1] * 20))
    >>> value, round(lower, 2), round(upper, 2)  # about 0.8 -+ 2 sqrt(0.8 * 0.2 / 100)
    (0.8, 0.72, 0.88)
    """
    between_zero_and_one("bootstrap: level", level)
    whole_number("bootstrap: resamples", resamples, least=2)
    value, count, key = metric(pred, y), len(pred), Key(seed)
    if not count:
        raise BadData("bootstrap needs at least one row. Got none. Check how the data were split or filtered.")
    rows: Callable[[Predictive, Tensor], Tensor] | None = getattr(metric, "rows", None)
    if rows is None:
        y = torch.as_tensor(y)
        chosen = (_chosen(1, count, key.fold(number))[0] for number in range(resamples))
        values = torch.tensor([metric(pred.rows(index), y[index.to(y.device)]) for index in chosen])
    else:
        scores = rows(pred, y).double().cpu()
        together = max(1, _ENTRIES // count)
        sizes = {low: min(together, resamples - low) for low in range(0, resamples, together)}
        values = torch.cat([scores[_chosen(size, count, key.fold(low))].mean(-1) for low, size in sizes.items()])
    values = values.double().sort().values
    outside = 0.5 * (1.0 - level) * (resamples - 1)
    return Bootstrap(value, float(values[int(outside)]), float(values[resamples - 1 - int(outside)]))


def _chosen(resamples: int, count: int, key: Key) -> Tensor:
    """Draw rows with replacement, (resamples, count)."""
    return torch.randint(count, (resamples, count), generator=key.generator("cpu"), device="cpu")
