"""Central intervals: how often they hold the target, and how wide they are."""

from torch import Tensor

from posterity.metrics.scored import mean_over_rows, per_row, regression, scored
from posterity.predictive.predictive import Predictive


@mean_over_rows
def coverage(pred: Predictive, y: Tensor, level: float = 0.95) -> Tensor:
    """Fraction of targets, over rows and outputs, inside the central interval of probability `level`.

    It is `level` for a calibrated predictive; both ends of the interval belong to it. Read it beside `interval_width`:
    wide intervals hold everything.

    >>> import torch
    >>> from posterity.predictive.gaussian import GaussianPredictive
    >>> pred = GaussianPredictive(torch.zeros(2, 1), torch.zeros(2, 1), torch.ones(1))
    >>> coverage(pred, torch.tensor([1.9, 2.0]))  # the interval ends at 1.96
    0.5
    """
    regression("coverage", pred, "expected_calibration_error")
    targets = scored("coverage", pred, y)
    lower, upper = pred.interval(level)
    return per_row((lower <= targets) & (targets <= upper), pred)


@mean_over_rows
def interval_width(pred: Predictive, y: Tensor, level: float = 0.95) -> Tensor:
    """Mean width, over rows and outputs, of the central interval of probability `level`; in the units of y.

    `y` is checked and not used.

    >>> import torch
    >>> from posterity.predictive.gaussian import GaussianPredictive
    >>> pred = GaussianPredictive(torch.zeros(2, 1), torch.zeros(2, 1), torch.ones(1))
    >>> round(interval_width(pred, torch.zeros(2)), 2)
    3.92
    """
    regression("interval_width", pred, "confidence")
    scored("interval_width", pred, y)
    lower, upper = pred.interval(level)
    return per_row(upper - lower, pred)
