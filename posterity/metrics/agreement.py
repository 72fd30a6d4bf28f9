"""Closeness to reference predictions, such as those of a long HMC run."""

from torch import Tensor

from posterity.errors import BadData
from posterity.metrics.scored import by_label, classification, mean_over_rows, per_row, probabilities
from posterity.predictive.predictive import Predictive


@mean_over_rows
def agreement(pred: Predictive, reference: Tensor) -> Tensor:
    """Fraction of labels whose most probable class is that of the reference probabilities (N, C), 0 to 1.

    **References**: Izmailov et al. (2021), What are Bayesian neural network posteriors really like?

    >>> import torch
    >>> from posterity.predictive.classes import ClassPredictive
    >>> agreement(ClassPredictive(torch.tensor([[0.9, 0.1], [0.2, 0.8]])), torch.tensor([[0.6, 0.4], [0.6, 0.4]]))
    0.5
    """
    probs, wanted = _both("agreement", pred, reference)
    return per_row(probs.max(-1).indices == wanted.max(-1).indices, pred)


@mean_over_rows
def total_variation(pred: Predictive, reference: Tensor) -> Tensor:
    """Mean over labels of sum_c |p_c - reference_c| / 2 against reference probabilities (N, C), 0 to 1; 0 is equal.

    **References**: Izmailov et al. (2021), What are Bayesian neural network posteriors really like?

    >>> import torch
    >>> from posterity.predictive.classes import ClassPredictive
    >>> total_variation(ClassPredictive(torch.tensor([[0.75, 0.25]])), torch.tensor([[0.5, 0.5]]))
    0.25
    """
    probs, wanted = _both("total_variation", pred, reference)
    return per_row(0.5 * (probs - wanted).abs().sum(-1), pred)


def _both(metric: str, pred: Predictive, reference: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities and those of the reference, (R, C) each."""
    classification(metric, pred, "root_mean_squared_error")
    wanted = probabilities(metric, reference, pred.probs)
    if not len(pred):
        raise BadData(f"{metric} needs at least one row. Got none. Check how the data were split or filtered.")
    return by_label(pred.probs), by_label(wanted)
