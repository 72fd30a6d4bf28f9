"""The divergence of a factorised Gaussian from a prior, with gradients of its own."""

from typing import NamedTuple

import torch
from torch import Tensor

from posterity.methods.parts.gradients.estimator import Factorised, Gradients, divergence
from posterity.model.problem import Problem
from posterity.numerics.random import Key


class Divergence(NamedTuple):
    """KL and its tempered form, with the gradients of the cross-entropy in mean and scale."""

    kl: Tensor
    tempered: Tensor
    grad_mean: Tensor
    grad_scale: Tensor


def divergence_of(joint: Problem, q: Factorised, key: Key) -> Divergence:
    """From gradients that begin at zero."""
    grads = Gradients(torch.zeros_like(q.mean), torch.zeros_like(q.scale))
    return Divergence(*divergence(joint, q, q.scale.log(), key, grads, 1.0), *grads)
