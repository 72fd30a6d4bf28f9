"""Where a run begins."""

import dataclasses

import torch
from torch import Tensor

from posterity.errors import shown
from posterity.inference.method import Target
from posterity.model.density import Density
from posterity.model.joint import Joint
from posterity.posteriors.posterior import Posterior


def starting_point(joint: Target, start: Posterior | Tensor | None) -> tuple[Target, Tensor]:
    """(joint, theta) to begin from; theta is a new tensor, (P,) or (M, P).

    A posterior brings all it knows: weights by name (those the joint freezes are frozen at its values), buffers, and
    the fitted parameters of its likelihood.
    """
    if not isinstance(joint, (Joint, Density)):
        raise TypeError(f"infer: the problem must be a Joint or a Density. Got {shown(joint)}.")
    if isinstance(start, Posterior):
        if isinstance(joint, Joint) and isinstance(start.joint, Joint):
            joint, theta = _from_posterior(joint, start, start.joint)
        else:
            theta = start.point()
    elif start is None:
        theta = joint.initial()
    elif isinstance(start, Tensor):
        theta = _from_tensor(joint, start)
    else:
        raise TypeError(f"start must be a Posterior, a tensor (P,) or (M, P), or None. Got {shown(start)}.")
    return joint, _members(joint, theta)


def _from_tensor(joint: Target, start: Tensor) -> Tensor:
    theta = start.detach().to(device=joint.device)
    if theta.dtype != joint.dtype:
        raise ValueError(f"start must have the model's dtype {joint.dtype}. Got {theta.dtype}. Convert it.")
    if isinstance(joint, Joint) and joint.likelihood.num_free and theta.shape[-1] == joint.num_weights:
        free = joint.likelihood.free(theta)
        theta = torch.cat([theta, free.expand(*theta.shape[:-1], -1)], dim=-1)
    return theta


def _from_posterior(joint: Joint, start: Posterior, origin: Joint) -> tuple[Joint, Tensor]:
    theta = start.point()
    known = {**origin.network.frozen, **origin.network.layout.unflatten(theta)}
    shapes = {name: tuple(value.shape) for name, value in origin.network.frozen.items()}
    shapes.update({part.name: part.shape for part in origin.network.layout})
    wanted = {name: tuple(value.shape) for name, value in joint.network.frozen.items()}
    wanted.update({part.name: part.shape for part in joint.network.layout})
    for name, shape in wanted.items():
        if shapes.get(name) != shape:
            raise ValueError(
                f"start comes from another network: it has no '{name}' of shape {shape}. "
                "Start from a posterior of the same network."
            )
    if theta.dim() > 1 and any(name not in origin.network.frozen for name in joint.network.frozen):
        raise ValueError(
            "start has several members, so the frozen weights would differ by member. Start from q.member(0)."
        )
    network = joint.network.replace(
        frozen={name: known[name] for name in joint.network.frozen},
        buffers=start.buffers or joint.network.buffers,
    )
    joint = dataclasses.replace(joint, network=network)
    weights = joint.network.layout.flatten({name: known[name] for name in joint.network.layout.names})
    raw = joint.likelihood.free_from(origin.likelihood, weights)
    return joint, torch.cat([weights, raw.expand(*weights.shape[:-1], -1)], dim=-1)


def _members(joint: Target, theta: Tensor) -> Tensor:
    """theta, repeated for each member of the joint where it has none of its own; its shape is checked."""
    if theta.dim() not in (1, 2) or theta.shape[-1] != joint.size:
        raise ValueError(
            f"start must have {joint.size} entries, ({joint.size},) or (members, {joint.size}). "
            f"Got shape {tuple(theta.shape)}."
        )
    if not bool(torch.isfinite(theta).all()):
        where = joint.layout.name_at(int((~torch.isfinite(theta)).nonzero()[0, -1]))
        raise ValueError(f"The starting weights must be finite. Got NaN or infinity in '{where}'. Mend or retrain them.")
    if joint.num_members is not None:
        if theta.dim() == 1:
            theta = theta.expand(joint.num_members, -1)
        elif theta.shape[0] != joint.num_members:
            raise ValueError(
                f"start must have one row for each of the joint's {joint.num_members} members. Got {theta.shape[0]}."
            )
    return theta.detach().clone()
