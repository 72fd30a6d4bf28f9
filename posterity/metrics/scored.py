"""The door of every metric: rows that can be scored."""

from torch import Tensor

from posterity.errors import BadData
from posterity.predictive.predictive import Predictive


def scored(metric: str, pred: Predictive, y: Tensor) -> Tensor:
    """The targets lined up with the predictive's rows; BadData where there are none or they do not fit."""
    targets = pred.check(y)
    if not len(pred):
        raise BadData(f"{metric} needs at least one row. Got none. Check how the data were split or filtered.")
    return targets


def classification(metric: str, pred: Predictive, instead: str) -> None:
    """Raise a TypeError unless the predictive has class probabilities."""
    if not pred.classifies:
        raise TypeError(f"{metric} needs a classification predictive. Got {type(pred).__name__}. Use {instead}.")


def regression(metric: str, pred: Predictive, instead: str) -> None:
    """Raise a TypeError unless the targets are numbers."""
    if pred.classifies:
        raise TypeError(f"{metric} needs a regression predictive. Got {type(pred).__name__}. Use {instead}.")
