"""Calibration errors, confidence, coverage and width of intervals."""

from dataclasses import dataclass

import torch
from torch import Tensor

from posterity.metrics.scores import (
    by_label,
    classification,
    labelled,
    mean_over_rows,
    per_row,
    regression,
    whole_number,
)
from posterity.predictive.classes import ClassPredictive
from posterity.predictive.predictive import Predictive


@dataclass(frozen=True, eq=False)
class Reliability:
    """Number of labels `count`, mean `confidence` and `accuracy` of each bin, (bins,) each; nan in empty bins."""

    count: Tensor
    confidence: Tensor
    accuracy: Tensor

    @property
    def gap(self) -> Tensor:
        """|accuracy - confidence| of each bin, (bins,); 0 where a bin is empty."""
        return (self.accuracy - self.confidence).abs().nan_to_num(0.0)

    @property
    def expected_gap(self) -> float:
        """The gap averaged over labels."""
        return float((self.count * self.gap).sum() / self.count.sum())


def reliability(pred: Predictive, y: Tensor, bins: int = 15) -> Reliability:
    """Count, mean confidence (largest class probability) and accuracy by bin (m / bins, (m + 1) / bins] of confidence.

    >>> table = reliability(ClassPredictive(torch.tensor([[0.9, 0.1], [0.7, 0.3]])), torch.tensor([0, 1]), bins=2)
    >>> table.count.tolist(), round(float(table.confidence[1]), 2), float(table.accuracy[1])
    ([0, 2], 0.8, 0.5)
    """
    confidence, correct = _confidence("reliability", pred, y, bins)
    return _table(confidence, correct, _equal_width(confidence, bins), bins)


def expected_calibration_error(pred: Predictive, y: Tensor, bins: int = 15) -> float:
    """Mean over labels of |accuracy - confidence| of the label's bin, 0 to 1; 0 is calibrated.

    **Math**: sum_m (count_m / N) |accuracy_m - confidence_m| over `bins` equal-width bins (m / bins, (m + 1) / bins]
    of the largest averaged class probability.

    **Limit**: it depends on `bins`, and a finite sample of a calibrated model scores above 0.

    >>> pred = ClassPredictive(torch.tensor([[0.9, 0.1], [0.7, 0.3]]))
    >>> round(expected_calibration_error(pred, torch.tensor([0, 1]), bins=2), 4)
    0.3
    """
    classification("expected_calibration_error", pred, "negative_log_likelihood")
    return reliability(pred, y, bins).expected_gap


def maximum_calibration_error(pred: Predictive, y: Tensor, bins: int = 15) -> float:
    """The largest |accuracy - confidence| of the bins of `reliability` that are not empty, 0 to 1.

    **Limit**: a bin of one label may decide it.

    >>> pred = ClassPredictive(torch.tensor([[0.9, 0.1], [0.3, 0.7]]))
    >>> round(maximum_calibration_error(pred, torch.tensor([0, 0]), bins=4), 4)
    0.7
    """
    classification("maximum_calibration_error", pred, "negative_log_likelihood")
    return float(reliability(pred, y, bins).gap.max())


def adaptive_calibration_error(pred: Predictive, y: Tensor, bins: int = 15) -> float:
    """Expected calibration error in bins of equal numbers of labels instead of equal width.

    **Math**: a label goes to bin floor(bins r / N), r the number of labels with less confidence; so equal confidences
    are never parted, and the order of the rows does not matter.

    **Limit**: as for `expected_calibration_error`; with fewer labels than bins each is a bin of its own.

    **References**: Nguyen and O'Connor (2015), Posterior calibration and exploratory analysis for natural language
    processing models.

    >>> pred = ClassPredictive(torch.tensor([[0.9, 0.1], [0.8, 0.2]]))
    >>> round(adaptive_calibration_error(pred, torch.tensor([0, 1]), bins=2), 4)  # (0.1 + 0.8) / 2
    0.45
    """
    confidence, correct = _confidence("adaptive_calibration_error", pred, y, bins)
    rank = torch.searchsorted(confidence.sort().values, confidence)  # labels with less confidence
    return _table(confidence, correct, (bins * rank) // len(rank), bins).expected_gap


def classwise_calibration_error(pred: Predictive, y: Tensor, bins: int = 15) -> float:
    """Mean over classes of the calibration error of each class probability against the frequency of that class.

    **Math**: (1/C) sum_c sum_m (count_cm / N) |frequency_cm - mean p_cm| over equal-width bins of p_c. It sees all
    probabilities, not the largest only.

    **Limit**: with many classes the lowest bin, whose probabilities are all near 0, dominates.

    **References**: Kull et al. (2019), Beyond temperature scaling.

    >>> pred = ClassPredictive(torch.tensor([[0.9, 0.1], [0.7, 0.3]]))
    >>> round(classwise_calibration_error(pred, torch.tensor([0, 1]), bins=2), 4)
    0.3
    """
    whole_number("classwise_calibration_error: bins", bins)
    probs, labels = (value.cpu() for value in labelled("classwise_calibration_error", pred, y)[:2])
    errors = [
        _table(column, (labels == label).double(), _equal_width(column, bins), bins).expected_gap
        for label, column in enumerate(probs.unbind(-1))
    ]
    return sum(errors) / len(errors)


def _confidence(metric: str, pred: Predictive, y: Tensor, bins: int) -> tuple[Tensor, Tensor]:
    """Confidence and correctness (0 or 1) of each label; on the CPU, since sums on a GPU vary from run to run."""
    classification(metric, pred, "negative_log_likelihood")
    whole_number(f"{metric}: bins", bins)
    probs, labels, _ = labelled(metric, pred, y)
    confidence, predicted = probs.cpu().max(-1)
    return confidence, (predicted == labels.cpu()).double()


def _equal_width(values: Tensor, bins: int) -> Tensor:
    """The bin of each value: m for (m / bins, (m + 1) / bins], 0 for 0."""
    edges = torch.arange(1, bins, dtype=torch.float64, device=values.device) / bins
    return torch.bucketize(values.contiguous(), edges)  # an edge belongs to the bin below it


def _table(confidence: Tensor, correct: Tensor, bin_of: Tensor, bins: int) -> Reliability:
    count = torch.bincount(bin_of, minlength=bins)
    means = [torch.bincount(bin_of, values, minlength=bins) / count for values in (confidence, correct)]
    return Reliability(count, *means)


@mean_over_rows
def confidence(pred: Predictive, y: Tensor) -> Tensor:
    """Mean over labels of the largest averaged class probability, 1/C to 1; calibrated where it equals the accuracy.

    `y` is checked and not used.

    >>> confidence(ClassPredictive(torch.tensor([[0.75, 0.25], [0.5, 0.5]])), torch.tensor([0, 0]))
    0.625
    """
    probs, _, seen = labelled("confidence", pred, y, "interval_width")
    return per_row(probs.amax(-1), pred, seen)


@mean_over_rows
def gibbs_confidence(pred: Predictive, y: Tensor) -> Tensor:
    """Mean over labels and posterior draws of the largest class probability.

    Never below `confidence`. It needs the posterior draws. `y` is checked and not used.

    >>> draws = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])
    >>> gibbs_confidence(ClassPredictive(draws.mean(0), draws), torch.tensor([0]))
    1.0
    """
    seen = labelled("gibbs_confidence", pred, y, "interval_width")[2]
    draws = pred.draws if isinstance(pred, ClassPredictive) else None
    if draws is None:
        raise ValueError(
            "gibbs_confidence needs the class probabilities of each posterior draw. Got averaged probabilities only. "
            "Predict with MonteCarlo(), or use confidence."
        )
    return per_row(by_label(draws.amax(2).movedim(0, 1)).mean(-1)[seen.reshape(-1)], pred, seen)


@mean_over_rows
def coverage(pred: Predictive, y: Tensor, level: float = 0.95) -> Tensor:
    """Fraction of targets, over rows and outputs, inside the central interval of probability `level`.

    It is `level` for a calibrated predictive; both ends of the interval belong to it. Read it beside `interval_width`:
    wide intervals hold everything.

    >>> from posterity.predictive import GaussianPredictive
    >>> pred = GaussianPredictive(torch.zeros(2, 1), torch.zeros(2, 1), torch.ones(1))
    >>> coverage(pred, torch.tensor([1.9, 2.0]))  # the interval ends at 1.96
    0.5
    """
    targets, seen = regression("coverage", pred, y, "expected_calibration_error")
    lower, upper = pred.interval(level)
    return per_row(((lower <= targets) & (targets <= upper))[seen], pred, seen)


@mean_over_rows
def interval_width(pred: Predictive, y: Tensor, level: float = 0.95) -> Tensor:
    """Mean width, over rows and outputs, of the central interval of probability `level`; in the units of y.

    `y` is checked and not used.

    >>> from posterity.predictive import GaussianPredictive
    >>> pred = GaussianPredictive(torch.zeros(2, 1), torch.zeros(2, 1), torch.ones(1))
    >>> round(interval_width(pred, torch.zeros(2)), 2)
    3.92
    """
    _, seen = regression("interval_width", pred, y, "confidence")
    lower, upper = pred.interval(level)
    return per_row((upper - lower)[seen], pred, seen)
