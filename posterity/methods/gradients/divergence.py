"""The part of an ELBO that no data enter: cross-entropy to the prior minus entropy."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from posterity.inference.method import Target
from posterity.methods.gradients.estimator import Factorised
from posterity.methods.gradients.workspace import workspace
from posterity.model.density import Density
from posterity.model.joint import Joint
from posterity.numerics.random import Key
from posterity.priors.normal import Normal

_HALF_LOG_TWO_PI_E = 0.5 * math.log(2.0 * math.pi * math.e)
# A point is a weight of almost no width: quadratures have no gradient at a width of zero, and this one moves the
# gradient by some 1e-10 over the third power of the prior's width.
_POINT = 1e-5
_LEAST = 1e-10  # nor do other cross-entropies than a Gaussian's where a scale is zero in the model's number type


class Divergence(NamedTuple):
    """KL(q || prior) with its tempered form pp E[-log p] - H(q), and the gradients of pp E[-log p] alone."""

    kl: Tensor  # (...)
    tempered: Tensor  # (...)
    grad_mean: Tensor  # (..., T); good until the next call, as is the next
    grad_scale: Tensor  # (..., R)


def divergence(joint: Target, q: Factorised, log_scale: Tensor, key: Key) -> Divergence:
    """From q and the logarithms (..., R) of its scales; by one draw where the prior has no cross-entropy.

    Points count by minus their log prior. Of a Density, which is data and prior in one, the entropy alone is left.
    """
    entropy = log_scale.sum(-1) + log_scale.shape[-1] * _HALF_LOG_TWO_PI_E
    if isinstance(joint, Density):
        return Divergence(-entropy, -entropy, torch.zeros_like(q.mean), torch.zeros_like(q.scale))
    value, grad_mean, grad_scale = _cross_entropy(joint, q, key)
    power = joint.powers[1]
    if isinstance(power, Tensor):
        grad_mean, grad_scale = grad_mean.mul_(power.unsqueeze(-1)), grad_scale.mul_(power.unsqueeze(-1))
    elif power != 1.0:
        grad_mean, grad_scale = grad_mean.mul_(power), grad_scale.mul_(power)
    return Divergence(value - entropy, power * value - entropy, grad_mean, grad_scale)


def _cross_entropy(joint: Joint, q: Factorised, key: Key) -> tuple[Tensor, Tensor, Tensor]:
    """-E log p over q, untempered, with its gradients."""
    weights, raw = joint.split(q.mean)
    prior = joint.bound_prior
    if prior.has_cross_entropy:
        scale = q.scale
        if q.places is not None:
            scale = torch.full_like(weights, _POINT).index_copy_(-1, q.places, scale)
        if not isinstance(prior, Normal):
            scale = scale.clamp_min(_LEAST)
        places = workspace(joint, "prior grad", weights), workspace(joint, "prior grad_scale", scale)
        value, grad_mean, grad_scale = prior.cross_entropy_and_grad(weights, scale, places)
        grad_scale = q.random(grad_scale)
    else:
        noise = q.noise(key)
        value, grad = prior.value_and_grad(joint.split(q.moved(noise))[0])
        value, grad_mean = -value, grad.neg_()
        grad_scale = q.random(grad_mean) * noise
    if raw.shape[-1]:
        extra, raw_grad = joint.free_value_and_grad(raw)
        value, grad_mean = value - extra, torch.cat([grad_mean, -raw_grad], dim=-1)
    return value, grad_mean, grad_scale
