"""Scores of classes that do not depend on a threshold or on the frequencies: AUROC, average precision, recall."""

from collections.abc import Callable

import torch
from torch import Tensor

from posterity.metrics.scores import labelled, row_of, with_row_weights
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
