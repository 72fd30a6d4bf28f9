"""Scores of an order: AUROC, average precision and recall of classes, detection of foreign inputs."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from posterity.errors import BadData, shown
from posterity.metrics.scores import Uncertainty, labelled, ranked, row_of, with_row_weights
from posterity.predictive.predictive import Predictive


@with_row_weights
def auroc(pred: Predictive, y: Tensor, weights: Tensor) -> Tensor:
    """Area under the receiver operating characteristic, 0 to 1; 1/2 is chance.

    **Math**: the probability that a label of a class has a larger predicted probability of it than another label; ties
    count half. Two classes have one area; of more classes it is the mean over classes, each against the rest.

    **Limit**: it sees the order of the rows only, not calibration. Classes without rows are left out; NaN where all
    labels are of one class.

    **Cost**: O(N log N) for each class.

    **References**: Hanley and McNeil (1982); Hand and Till (2001), for several classes.

    >>> from posterity.predictive import ClassPredictive
    >>> auroc(ClassPredictive(torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.7, 0.3]])), torch.tensor([0, 1, 0]))
    1.0
    """
    return _over_classes("auroc", pred, y, weights, _area)


@with_row_weights
def average_precision(pred: Predictive, y: Tensor, weights: Tensor) -> Tensor:
    """Average precision of the second of two classes, or the mean over more classes; the area below precision-recall.

    **Math**: sum over thresholds of (recall_n - recall_{n-1}) precision_n, without interpolation.

    **Limit**: chance is the frequency of the class, so values of different data do not compare. Classes without rows
    are left out; NaN where all labels are of one class.

    **References**: Davis and Goadrich (2006), The relationship between precision-recall and ROC curves.

    >>> from posterity.predictive import ClassPredictive
    >>> average_precision(ClassPredictive(torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.3, 0.7]])), torch.tensor([0, 1, 0]))
    0.5
    """
    return _over_classes("average_precision", pred, y, weights, _precision)


@with_row_weights
def balanced_accuracy(pred: Predictive, y: Tensor, weights: Tensor) -> Tensor:
    """Mean over classes of the fraction of a class's labels that are predicted, 0 to 1: rare classes count as much.

    >>> from posterity.predictive import ClassPredictive
    >>> balanced_accuracy(ClassPredictive(torch.tensor([[0.9, 0.1]] * 4)), torch.tensor([0, 0, 0, 1]))
    0.5
    """
    probs, labels, weights = _labels("balanced_accuracy", pred, y, weights)
    right = (probs.max(1).indices == labels).double()
    of_class = torch.nn.functional.one_hot(labels, probs.shape[1]).double()  # (R, C)
    recall = (weights * right) @ of_class / (weights @ of_class)  # 0 / 0 where a class has no rows
    return recall.nanmean(1)


def out_of_distribution_auroc(inside: Predictive, outside: Predictive, uncertainty: Uncertainty | None = None) -> float:
    """Probability that an out-of-distribution input has a less certain prediction; ties count half.

    **Math**: the area under the receiver operating characteristic of the predictive entropy of a label, or of the
    predictive standard deviation of numbers (the geometric mean over several), as a detector H:
    mean over pairs of 1[H_out > H_in] + 1[H_out = H_in] / 2. 1 is perfect, 1/2 is chance. Exact, by ranks.
    `uncertainty` is another detector, such as `lambda pred: pred.epistemic`: a number for each row or label, larger
    where the prediction is less certain.

    **Limit**: entropy does not tell a label that is noisy from one that is unknown. Inputs far from a border of
    classes look certain to a network whose logits grow, so that values below 1/2 are usual for point estimates.

    **Cost**: O(N log N).

    **References**: Hendrycks and Gimpel (2017), A baseline for detecting misclassified and out-of-distribution
    examples.

    >>> from posterity.predictive import ClassPredictive
    >>> inside = ClassPredictive(torch.tensor([[0.9, 0.1], [0.8, 0.2]]))
    >>> outside = ClassPredictive(torch.tensor([[0.5, 0.5], [0.2, 0.8]]))
    >>> out_of_distribution_auroc(inside, outside)  # (1 + 1 + 1 + 1/2) / 4
    0.875
    """
    low, high = _detected("out_of_distribution_auroc", inside, outside, uncertainty)
    low = low.sort().values
    below, upto = torch.searchsorted(low, high), torch.searchsorted(low, high, right=True)
    return float((below + upto).double().mean()) / (2.0 * len(low))


def out_of_distribution_average_precision(
    inside: Predictive, outside: Predictive, uncertainty: Uncertainty | None = None
) -> float:
    """Average precision of the detector of `out_of_distribution_auroc`, foreign inputs being those to detect (AUPR).

    **Limit**: chance is the share of foreign rows, so values of different shares do not compare. Exchange the sides
    and change the sign of the uncertainty for the AUPR of the usual inputs.

    **References**: Hendrycks and Gimpel (2017), section 2.

    >>> from posterity.predictive import ClassPredictive
    >>> inside = ClassPredictive(torch.tensor([[0.9, 0.1], [0.6, 0.4]]))
    >>> out_of_distribution_average_precision(inside, ClassPredictive(torch.tensor([[0.3, 0.7]])))  # second of three
    0.5
    """
    low, high = _detected("out_of_distribution_average_precision", inside, outside, uncertainty)
    foreign = torch.arange(len(low) + len(high), device="cpu") >= len(low)
    weights = torch.ones(1, len(foreign), dtype=torch.float64, device="cpu")
    return float(_precision(torch.cat([low, high]), foreign, weights))


def out_of_distribution_fpr(
    inside: Predictive, outside: Predictive, accepted: float = 0.95, uncertainty: Uncertainty | None = None
) -> float:
    """Share of foreign inputs that pass where at least the share `accepted` of the usual inputs does (FPR at 95 % TPR).

    **Math**: share of outside rows with H <= h, h the smallest uncertainty with H <= h in the share `accepted` of the
    inside rows, and H as in `out_of_distribution_auroc`. 0 is perfect, `accepted` is chance.

    **Limit**: usual inputs are the positives here, as in Liang et al.; some authors take the foreign ones.

    **References**: Liang, Li and Srikant (2018), Enhancing the reliability of out-of-distribution image detection.

    >>> from posterity.predictive import ClassPredictive
    >>> inside = ClassPredictive(torch.tensor([[0.9, 0.1], [0.6, 0.4]]))
    >>> out_of_distribution_fpr(inside, ClassPredictive(torch.tensor([[0.3, 0.7], [0.5, 0.5]])))
    0.5
    """
    if isinstance(accepted, bool) or not isinstance(accepted, (int, float)) or not 0.0 < accepted <= 1.0:
        raise ValueError(
            f"out_of_distribution_fpr: accepted must be a share above 0 and at most 1. Got {shown(accepted)}."
        )
    low, high = _detected("out_of_distribution_fpr", inside, outside, uncertainty)
    threshold = low.sort().values[math.ceil(accepted * len(low) - 1e-9) - 1]
    return float((high <= threshold).double().mean())


def _detected(
    metric: str, inside: Predictive, outside: Predictive, uncertainty: Uncertainty | None
) -> tuple[Tensor, Tensor]:
    """The uncertainty of each row or label inside and outside, on the CPU."""
    for pred in (inside, outside):
        if not len(pred):
            raise BadData(f"{metric} needs at least one row on either side. Got none. Check the data.")
    if inside.classifies != outside.classifies:
        raise TypeError(f"{metric} needs labels on both sides, or numbers on both. Got one of each.")
    if uncertainty is not None:
        return ranked(metric, inside, uncertainty), ranked(metric, outside, uncertainty)
    score = _entropy if inside.classifies else _log_std
    return score(inside), score(outside)


def _entropy(pred: Predictive) -> Tensor:
    """Entropy of each label, (R,), summed in sorted order: the same bits for any order of the classes."""
    entropy: Tensor = torch.special.entr(pred.probs.double().movedim(1, -1)).sort(-1).values.sum(-1)
    return entropy.reshape(-1).cpu()


def _log_std(pred: Predictive) -> Tensor:
    """Log standard deviation of each row, (N,), the mean over its numbers."""
    return pred.std.double().log().reshape(len(pred), -1).mean(1).cpu()


def _labels(metric: str, pred: Predictive, y: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Probabilities (R, C), labels (R,) and weights (B, R) of all labels, on the CPU."""
    probs, labels, seen = (value.cpu() for value in labelled(metric, pred, y))
    return probs, labels, weights.cpu()[:, row_of(seen)]


def _over_classes(
    metric: str, pred: Predictive, y: Tensor, weights: Tensor, score: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> Tensor:
    """The mean over classes of a score of each against the rest; of two classes, the score of the second."""
    probs, labels, weights = _labels(metric, pred, y, weights)
    classes = range(probs.shape[1]) if probs.shape[1] > 2 else (1,)
    return torch.stack([score(probs[:, label], labels == label, weights) for label in classes]).nanmean(0)


def _area(scores: Tensor, positive: Tensor, weights: Tensor) -> Tensor:
    """Areas (B,) under the curve; NaN without rows on either side."""
    ordered, order = scores.sort()
    weights, positive = weights[:, order], positive[order]
    others = weights * ~positive
    below = torch.nn.functional.pad(others.cumsum(1), (1, 0))  # weight of the others before each place
    first, after = torch.searchsorted(ordered, ordered), torch.searchsorted(ordered, ordered, right=True)
    own = weights * positive
    pairs = (own * 0.5 * (below[:, first] + below[:, after])).sum(1)
    return pairs / (own.sum(1) * others.sum(1))


def _precision(scores: Tensor, positive: Tensor, weights: Tensor) -> Tensor:
    """Average precisions (B,); NaN without rows on either side."""
    ordered, order = (-scores).sort()
    weights, positive = weights[:, order], positive[order]
    own = weights * positive
    upto = torch.searchsorted(ordered, ordered, right=True) - 1  # the last row with the same score
    precision = (own.cumsum(1) / weights.cumsum(1))[:, upto].nan_to_num(0.0)
    total, one_class = own.sum(1), (own == weights).all(1)
    return torch.where(one_class, torch.nan, (own * precision).sum(1) / total)
