"""From posterior draws of network outputs to a predictive."""

import math

import torch
from torch import Tensor

from posterity.likelihoods.bernoulli import Bernoulli
from posterity.likelihoods.categorical import Categorical
from posterity.likelihoods.likelihood import Likelihood
from posterity.predictive.classes import ClassPredictive
from posterity.predictive.draws import DrawsPredictive
from posterity.predictive.predictive import Predictive


def from_outputs(likelihood: Likelihood, outputs: Tensor) -> Predictive:
    """The predictive (1/S) sum_s p(y | f_s) of outputs (S, N, *event) under a likelihood.

    A Bernoulli or Categorical likelihood gives a `ClassPredictive`, its probabilities averaged in float64 so that
    the log of a tiny one stays finite; any other likelihood gives a `DrawsPredictive`.

    >>> from_outputs(Categorical(), torch.zeros(3, 2, 4)).probs[0].tolist()
    [0.25, 0.25, 0.25, 0.25]
    """
    if outputs.dim() < 2 or not outputs.shape[0]:
        raise ValueError(
            f"outputs must be (S, N, *event) with S >= 1 draws. Got {tuple(outputs.shape)}. "
            "Give a single output as outputs.unsqueeze(0)."
        )
    if isinstance(likelihood, Bernoulli):
        draws = binary_probs(one_logit(outputs.double(), leading=2))  # (S, N, 2)
    elif isinstance(likelihood, Categorical):
        draws = likelihood.mean(outputs.double())  # (S, N, C)
    else:
        return DrawsPredictive(likelihood, outputs)
    return ClassPredictive(draws.mean(0), draws.to(outputs.dtype))


def one_logit(values: Tensor, leading: int) -> Tensor:
    """Values of a single output without its event axis, if there is one: all but the first `leading` axes go."""
    if math.prod(values.shape[leading:]) != 1:
        raise ValueError(
            "Bernoulli needs one output for each row. "
            f"Got outputs of shape {tuple(values.shape)}. For several classes use Categorical."
        )
    return values.reshape(values.shape[:leading])


def binary_probs(logits: Tensor) -> Tensor:
    """Probabilities (..., 2) of y = 0 and y = 1 from logits (...), neither by subtraction from 1."""
    return torch.stack([torch.sigmoid(-logits), torch.sigmoid(logits)], dim=-1)
