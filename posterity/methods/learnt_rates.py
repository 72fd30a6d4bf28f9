"""What the prior and the entropy of the masks say where dropout rates are learnt."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from posterity.model.joint import Joint
from posterity.numerics.coin import coin_entropy
from posterity.numerics.layout import Slice
from posterity.priors.normal import Normal

NAME = "rate_logit"


class LearntRate(NamedTuple):
    """Where the logit of a rate and the weights behind it are in theta, and how many units it drops."""

    name: str
    logit: Slice
    weight: Slice
    units: int


def learnt_rates(joint: Joint) -> tuple[LearntRate, ...]:
    """The rates of the `ConcreteDropout` layers that are in theta."""
    parts = {part.name: part for part in joint.network.layout}
    found = []
    for name, logit in parts.items():
        owner, _, last = name.rpartition(".")
        if last != NAME:
            continue
        weight = parts.get(f"{owner}.layer.weight" if owner else "layer.weight")
        if weight is None:
            raise ValueError(
                f"MCDropout: the rate '{name}' is learnt but the weights behind it are frozen, so they have no prior. "
                "Freeze both or neither."
            )
        found.append(LearntRate(owner, logit, weight, weight.shape[1]))
    return tuple(found)


def check_learnt_rates(joint: Joint) -> None:
    """A ValueError where rates are learnt under a prior that is not a normal one around zero."""
    prior = joint.bound_prior
    if learnt_rates(joint) and not (isinstance(prior, Normal) and not bool(torch.as_tensor(prior.mean).any())):
        raise ValueError(
            f"MCDropout: learnt rates need normal priors with mean 0. Got {type(joint.prior).__name__}. Use Normal, or "
            "Layerwise of scale rules, or torch.nn.Dropout with rates that are given."
        )


def prior_value_and_grad(joint: Joint, theta: Tensor, rates: tuple[LearntRate, ...]) -> tuple[Tensor, Tensor]:
    """pp E_q log p(w) + H(masks) up to a constant, in nats, and its gradient in theta (..., T).

    A row of weights W behind a rate p is W / (1 - p) with probability 1 - p and 0 else, so that a normal prior
    of scale s gives -|W|^2 / (2 s^2 (1 - p)), which is its log density at W / sqrt(1 - p). The rates have a flat prior.
    """
    leaf = theta.detach().requires_grad_()
    with torch.enable_grad():
        weights, raw = joint.split(leaf)
        moved, entropy = weights.clone(), torch.zeros((), dtype=leaf.dtype, device=leaf.device)
        variance = joint.bound_prior.variance(weights.detach())
        for one in rates:
            logit = weights[..., one.logit.offset : one.logit.offset + 1]
            own = slice(one.weight.offset, one.weight.offset + one.weight.size)
            moved[..., own] = weights[..., own] * (1.0 + logit.exp()).sqrt()  # 1 / (1 - p) = 1 + exp(logit)
            moved[..., one.logit.offset] = 0.0
            entropy = entropy + one.units * coin_entropy(logit.squeeze(-1))
        value = joint.bound_prior.log_prob(moved)
        for one in rates:  # the log density of a logit at 0, which is no part of a flat prior
            value = value + 0.5 * torch.log(2.0 * math.pi * variance[..., one.logit.offset])
        value = joint.powers[1] * (value + joint.likelihood.free_log_prior(raw)) + entropy
        grad = torch.autograd.grad(value.sum(), leaf)[0]
    return value.detach(), grad
