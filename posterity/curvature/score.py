"""Gradients of log-likelihoods in the outputs."""

import torch
from torch import Tensor

from posterity.likelihoods.likelihood import Likelihood


def score(likelihood: Likelihood, outputs: Tensor, targets: Tensor) -> Tensor:
    """d log p(y | f) / d f for each row, (n, *event)."""
    leaf = outputs.detach().requires_grad_()
    with torch.enable_grad():
        value = likelihood.log_prob(leaf, targets).sum()
    (grad,) = torch.autograd.grad(value, leaf)
    return grad
