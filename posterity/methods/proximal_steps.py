"""What a proximal step of MAP needs of a problem: its smooth part, and the step that the prior's kinks take."""

import torch
from torch import Tensor

from posterity.errors import shown
from posterity.inference.method import Target
from posterity.model.batch import Batch
from posterity.model.joint import Joint
from posterity.model.network import Buffers
from posterity.numerics.optimizer import Proximal


def with_kinks(joint: Target) -> Joint:
    """The problem itself; a TypeError where it has no prior that could have kinks."""
    if isinstance(joint, Joint):
        return joint
    raise TypeError(
        "MAP(proximal=True) needs a Joint, whose prior says where it has kinks; a Density does not tell prior from "
        f"data. Got {shown(joint)}. Use MAP without proximal."
    )


def smooth_value_and_grad(
    joint: Joint, theta: Tensor, batch: Batch, buffers: Buffers
) -> tuple[Tensor, Tensor, Buffers]:
    """As `Joint.value_and_grad`, with the gradient of all but the prior's kinks."""
    value, grad, buffers = joint.data_value_and_grad(theta, batch, buffers)
    weights, raw = joint.split(theta.detach())
    prior_value, prior_grad = joint.bound_prior.smooth_value_and_grad(weights)
    if raw.shape[-1]:
        extra, raw_grad = joint.free_value_and_grad(raw)
        prior_value, prior_grad = prior_value + extra, torch.cat([prior_grad, raw_grad], dim=-1)
    power = joint.powers[1]
    grad.add_(prior_grad * (power.unsqueeze(-1) if isinstance(power, Tensor) else power))
    return value + power * prior_value, grad, buffers


def proximal_of(joint: Joint) -> Proximal:
    """The proximal operator of -prior_power / num_data times the part of the log prior with kinks.

    The likelihood's own parameters, at the end of theta, are left as they are.
    """
    power = joint.powers[1]
    factor = (power.unsqueeze(-1) if isinstance(power, Tensor) else power) / joint.num_data

    def proximal(theta: Tensor, step: float | Tensor) -> Tensor:
        weights, raw = joint.split(theta)
        if isinstance(step, Tensor) and step.dim():
            step = step[..., : joint.num_weights]
        return torch.cat([joint.bound_prior.proximal(weights, step * factor), raw], dim=-1)

    return proximal
