"""The part of an ELBO that no data enter: cross-entropy to the prior minus entropy."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from posterity.inference.method import Info, Target
from posterity.methods.gradients.estimator import Factorised, Gradients
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
    """KL(q || prior), and its tempered form pp E[-log p] - H(q)."""

    kl: Tensor  # (...)
    tempered: Tensor  # (...)

    def info(self, joint: Target, value: Tensor) -> Info:
        """What a trace says of an ELBO whose tempered data term is `value` (...), in nats for each datum."""
        data_fit, kl = value / (joint.powers[0] * joint.num_data), self.kl / joint.num_data
        loss = (self.tempered - value) / joint.num_data
        return {"loss": loss, "data_fit": data_fit, "kl": kl, "elbo": data_fit - kl}


def divergence(
    joint: Target, q: Factorised, log_scale: Tensor, key: Key, grads: Gradients, factor: float | Tensor
) -> Divergence:
    """From q and the logarithms (..., R) of its scales; by one draw where the prior has no cross-entropy.

    `factor` times the gradients of pp E[-log p] is added to `grads`; those of the entropy are not. Points count by
    minus their log prior. Of a Density, which is data and prior in one, the entropy alone is left.
    """
    entropy = log_scale.sum(-1) + log_scale.shape[-1] * _HALF_LOG_TWO_PI_E
    if isinstance(joint, Density):
        return Divergence(-entropy, -entropy)
    power = joint.powers[1]
    value = _cross_entropy(joint, q, key, grads, factor * (power.unsqueeze(-1) if isinstance(power, Tensor) else power))
    kl = value - entropy
    tempered = kl if not isinstance(power, Tensor) and power == 1.0 else power * value - entropy
    return Divergence(kl, tempered)


def _cross_entropy(joint: Joint, q: Factorised, key: Key, grads: Gradients, factor: float | Tensor) -> Tensor:
    """-E log p over q, untempered; `factor` times its gradients is added to `grads`."""
    weights, raw = joint.split(q.mean)
    grad_weights, grad_raw = joint.split(grads.mean)
    prior = joint.bound_prior
    given = q.scale if isinstance(prior, Normal) else q.scale.clamp_min(_LEAST)
    if not prior.has_cross_entropy:
        noise = q.noise(key)
        value, grad = prior.value_and_grad(joint.split(q.moved(noise))[0])
        value, grad = -value, grad.mul_(-factor)
        grad_weights.add_(grad)
        grads.scale.addcmul_(q.random(grad), noise)
    elif q.places is None:
        value = prior.add_cross_entropy_grad(weights, given, grad_weights, grads.scale, factor)
    else:
        scale = torch.full_like(weights, _POINT).index_copy_(-1, q.places, given)
        grad_scale = torch.zeros_like(scale)
        value = prior.add_cross_entropy_grad(weights, scale, grad_weights, grad_scale, factor)
        grads.scale.add_(q.random(grad_scale))
    if raw.shape[-1]:
        extra, raw_grad = joint.free_value_and_grad(raw)
        value = value - extra
        grad_raw.sub_(raw_grad * factor)
    return value
