"""Fraction of correct labels."""

from torch import Tensor

from posterity.metrics.scored import labelled, mean_over_rows, per_row
from posterity.predictive.predictive import Predictive


@mean_over_rows
def accuracy(pred: Predictive, y: Tensor) -> Tensor:
    """Fraction of labels that are the most probable class, 0 to 1; the first class wins a tie.

    >>> import torch
    >>> from posterity.predictive.classes import ClassPredictive
    >>> accuracy(ClassPredictive(torch.tensor([[0.9, 0.1], [0.2, 0.8]])), torch.tensor([0, 0]))
    0.5
    """
    probs, labels = labelled("accuracy", pred, y, "root_mean_squared_error")
    return per_row(probs.max(-1).indices == labels, pred)
