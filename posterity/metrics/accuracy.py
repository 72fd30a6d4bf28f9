"""Fraction of correct labels."""

from torch import Tensor

from posterity.metrics.scored import classification, scored
from posterity.predictive.predictive import Predictive


def accuracy(pred: Predictive, y: Tensor) -> float:
    """Fraction of rows whose most probable class is the label, 0 to 1; the first class wins a tie.

    >>> import torch
    >>> from posterity.predictive.classes import ClassPredictive
    >>> accuracy(ClassPredictive(torch.tensor([[0.9, 0.1], [0.2, 0.8]])), torch.tensor([0, 0]))
    0.5
    """
    classification("accuracy", pred, "root_mean_squared_error")
    labels = scored("accuracy", pred, y)
    return float((pred.probs.max(-1).indices == labels).double().mean())
