"""From posterior draws of network outputs to a predictive."""

import torch
from torch import Tensor
from torch.nn import functional as F

from posterity.likelihoods.bernoulli import Bernoulli
from posterity.likelihoods.categorical import Categorical
from posterity.likelihoods.likelihood import Likelihood
from posterity.predictive.classes import ClassPredictive
from posterity.predictive.draws import DrawsPredictive
from posterity.predictive.predictive import Predictive


def from_outputs(likelihood: Likelihood, outputs: Tensor, *, shared: bool = True) -> Predictive:
    """The predictive (1/S) sum_s p(y | f_s) of outputs (S, N, *event) under a likelihood.

    A Bernoulli or Categorical likelihood gives a `ClassPredictive`, its probabilities averaged in float64 so that
    the log of a tiny one stays finite; any other likelihood gives a `DrawsPredictive`. `shared` says that draw s is
    of the same weights in all rows (of one weight draw, or one dropout mask for all), as `joint_log_prob` needs.

    >>> from_outputs(Categorical(), torch.zeros(3, 2, 4)).probs[0].tolist()
    [0.25, 0.25, 0.25, 0.25]
    """
    if outputs.dim() < 2 or not outputs.shape[0]:
        raise ValueError(
            f"outputs must be (S, N, *event) with S >= 1 draws. Got {tuple(outputs.shape)}. "
            "Give a single output as outputs.unsqueeze(0)."
        )
    if isinstance(likelihood, Bernoulli):
        logits = labels_only(outputs.double(), leading=2)
        log_draws = torch.stack([F.logsigmoid(-logits), F.logsigmoid(logits)], dim=2)  # (S, N, 2, *event)
    elif isinstance(likelihood, Categorical):
        if outputs.dim() != 3 + likelihood.positions:
            raise ValueError(
                f"{likelihood} needs outputs (S, N, C) with {likelihood.positions} axes of positions after them. "
                f"Got {tuple(outputs.shape)}. Say by Categorical(positions=...) how many axes follow the classes."
            )
        log_draws = outputs.double().log_softmax(2)  # (S, N, C, *positions)
    else:
        return DrawsPredictive(likelihood, outputs, shared=shared)
    return ClassPredictive.of_log_probs(log_draws, outputs.dtype, shared=shared)


def labels_only(values: Tensor, leading: int) -> Tensor:
    """Values of binary labels (*leading axes, *event), where an event of one label loses its axis."""
    return values.squeeze(-1) if values.shape[leading:] == (1,) else values


def binary_probs(logits: Tensor) -> Tensor:
    """Probabilities (N, 2, *event) of y = 0 and y = 1 from logits (N, *event), neither by subtraction from 1."""
    return torch.stack([torch.sigmoid(-logits), torch.sigmoid(logits)], dim=1)
