"""Negative log-likelihood of held-out targets."""

from torch import Tensor

from posterity.metrics.scored import mean_over_rows, scored
from posterity.predictive.predictive import Predictive


@mean_over_rows
def negative_log_likelihood(pred: Predictive, y: Tensor) -> Tensor:
    """Mean over rows of -log p(y_n) under the averaged predictive, in nats; lower is better.

    **Math**: -(1/N) sum_n log E p(y_n | w): the log of the average over the posterior. The average of the log
    (`gibbs_negative_log_likelihood`) is never smaller, by Jensen, and scores a random weight instead of the
    prediction. All outputs or positions of a row count together.

    >>> import torch
    >>> from posterity.predictive.classes import ClassPredictive
    >>> pred = ClassPredictive(torch.tensor([[0.5, 0.5], [0.25, 0.75]]))
    >>> round(negative_log_likelihood(pred, torch.tensor([0, 1])), 4)
    0.4904
    """
    return -pred.log_prob(scored("negative_log_likelihood", pred, y))


@mean_over_rows
def gibbs_negative_log_likelihood(pred: Predictive, y: Tensor) -> Tensor:
    """Mean over rows of -E log p(y_n | w) over the posterior, in nats: the loss of a weight drawn at random.

    **Math**: -(1/N) sum_n (1/S) sum_s log p(y_n | w_s); in closed form for Gaussian outputs and noise. Never below
    `negative_log_likelihood`, which averages before it takes the log. It needs the posterior draws, not their
    averaged probabilities.

    >>> import torch
    >>> from posterity.predictive.classes import ClassPredictive
    >>> draws = torch.tensor([[[0.5, 0.5]], [[0.25, 0.75]]])
    >>> pred = ClassPredictive(draws.mean(0), draws)
    >>> round(gibbs_negative_log_likelihood(pred, torch.tensor([0])), 4)  # (log 2 + log 4) / 2
    1.0397
    """
    return -pred.expected_log_prob(scored("gibbs_negative_log_likelihood", pred, y))
