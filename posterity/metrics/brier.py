"""Squared distance of class probabilities from the label."""

import torch
from torch import Tensor

from posterity.metrics.scored import labelled, mean_over_rows, per_row
from posterity.predictive.predictive import Predictive


@mean_over_rows
def brier_score(pred: Predictive, y: Tensor) -> Tensor:
    """Mean over labels of the SUM over classes of (p_c - 1[y = c])^2, 0 to 2; lower is better.

    Half of it is the Brier score of those who count a binary problem's second class only.

    >>> from posterity.predictive.classes import ClassPredictive
    >>> brier_score(ClassPredictive(torch.tensor([[0.5, 0.5], [0.0, 1.0]])), torch.tensor([0, 1]))
    0.25
    """
    probs, labels = labelled("brier_score", pred, y)
    squares = (probs - torch.nn.functional.one_hot(labels, probs.shape[1])).square().sum(-1)
    return per_row(squares, pred)
