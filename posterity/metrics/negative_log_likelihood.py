"""Negative log-likelihood of held-out targets."""

from torch import Tensor

from posterity.metrics.scored import scored
from posterity.predictive.predictive import Predictive


def negative_log_likelihood(pred: Predictive, y: Tensor) -> float:
    """Mean over rows of -log p(y_n) under the averaged predictive, in nats; lower is better.

    **Math**: -(1/N) sum_n log E p(y_n | w): the log of the average over the posterior. The average of the log
    (the Gibbs loss) is never smaller, by Jensen, and scores a random weight instead of the prediction.

    >>> import torch
    >>> from posterity.predictive.classes import ClassPredictive
    >>> pred = ClassPredictive(torch.tensor([[0.5, 0.5], [0.25, 0.75]]))
    >>> round(negative_log_likelihood(pred, torch.tensor([0, 1])), 4)
    0.4904
    """
    return float(-pred.log_prob(scored("negative_log_likelihood", pred, y)).double().mean())
