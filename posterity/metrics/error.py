"""Distance of the predictive mean from the targets."""

from torch import Tensor

from posterity.metrics.scored import mean_over_rows, per_row, regression, scored
from posterity.predictive.predictive import Predictive


def root_mean_squared_error(pred: Predictive, y: Tensor) -> float:
    """Square root of the mean, over rows and outputs, of (y - predictive mean)^2; in the units of y.

    >>> import torch
    >>> from posterity.predictive.gaussian import GaussianPredictive
    >>> pred = GaussianPredictive(torch.zeros(2, 1), torch.ones(2, 1), torch.ones(1))
    >>> root_mean_squared_error(pred, torch.tensor([1.0, 7.0]))
    5.0
    """
    regression("root_mean_squared_error", pred, "accuracy")
    targets = scored("root_mean_squared_error", pred, y)
    return float((targets - pred.mean).double().square().mean().sqrt())


@mean_over_rows
def mean_absolute_error(pred: Predictive, y: Tensor) -> Tensor:
    """Mean, over rows and outputs, of |y - predictive mean|; in the units of y.

    >>> import torch
    >>> from posterity.predictive.gaussian import GaussianPredictive
    >>> pred = GaussianPredictive(torch.zeros(2, 1), torch.ones(2, 1), torch.ones(1))
    >>> mean_absolute_error(pred, torch.tensor([1.0, -7.0]))
    4.0
    """
    regression("mean_absolute_error", pred, "accuracy")
    targets = scored("mean_absolute_error", pred, y)
    return per_row((targets - pred.mean).double().abs(), pred)
