"""Whether confidence agrees with accuracy."""

from dataclasses import dataclass

import torch
from torch import Tensor

from posterity.errors import shown
from posterity.metrics.scored import classification, scored
from posterity.predictive.predictive import Predictive


@dataclass(frozen=True, eq=False)
class Reliability:
    """What happened in each of the equal-width bins (m / bins, (m + 1) / bins] of confidence.

    `count` (bins,) of rows, their mean `confidence` (bins,) and their `accuracy` (bins,); both are nan where
    a bin is empty.
    """

    count: Tensor
    confidence: Tensor
    accuracy: Tensor


def reliability(pred: Predictive, y: Tensor, bins: int = 15) -> Reliability:
    """Count, mean confidence (largest class probability) and accuracy by bin of confidence.

    >>> from posterity.predictive.classes import ClassPredictive
    >>> table = reliability(ClassPredictive(torch.tensor([[0.9, 0.1], [0.7, 0.3]])), torch.tensor([0, 1]), bins=2)
    >>> table.count.tolist(), round(float(table.confidence[1]), 2), float(table.accuracy[1])
    ([0, 2], 0.8, 0.5)
    """
    classification("reliability", pred, "negative_log_likelihood")
    if isinstance(bins, bool) or not isinstance(bins, int) or bins < 1:
        raise ValueError(f"reliability: bins must be a positive integer. Got {shown(bins)}.")
    labels = scored("reliability", pred, y)
    confidence, predicted = pred.probs.double().cpu().max(-1)  # on a GPU the sums below would vary from run to run
    edges = torch.arange(1, bins, dtype=torch.float64) / bins
    where = torch.bucketize(confidence, edges)  # an edge belongs to the bin below it
    count = torch.bincount(where, minlength=bins)
    correct = (predicted == labels.cpu()).double()
    return Reliability(
        count=count,
        confidence=torch.bincount(where, confidence, minlength=bins) / count,
        accuracy=torch.bincount(where, correct, minlength=bins) / count,
    )


def expected_calibration_error(pred: Predictive, y: Tensor, bins: int = 15) -> float:
    """Mean over rows of |accuracy - confidence| of the row's bin, 0 to 1; 0 is calibrated.

    **Math**: sum_m (count_m / N) |accuracy_m - confidence_m| over `bins` equal-width bins (m / bins, (m + 1) / bins]
    of the largest averaged class probability.

    **Limit**: it depends on `bins`, and a finite sample of a calibrated model scores above 0.

    >>> from posterity.predictive.classes import ClassPredictive
    >>> pred = ClassPredictive(torch.tensor([[0.9, 0.1], [0.7, 0.3]]))
    >>> round(expected_calibration_error(pred, torch.tensor([0, 1]), bins=2), 4)
    0.3
    """
    classification("expected_calibration_error", pred, "negative_log_likelihood")
    table = reliability(pred, y, bins)
    gap = (table.accuracy - table.confidence).abs().nan_to_num(0.0)  # empty bins weigh nothing
    return float((table.count * gap).sum() / table.count.sum())
