"""Where a run begins."""

import dataclasses

import torch
from torch import Tensor

from posterity.errors import shown
from posterity.inference.method import Method, Target
from posterity.model.data import Data, TensorData
from posterity.model.joint import Joint
from posterity.numerics.random import Key
from posterity.posteriors.posterior import Posterior


def starting_point(
    method: Method, joint: Target, start: Posterior | Tensor | None, data: Data, key: Key
) -> tuple[Target, Tensor]:
    """(joint, theta) to begin from; theta (P,) or (M, P) is a new tensor, which members may share (no copy for each).

    A posterior brings all it knows: weights by name (those the joint freezes are frozen at its values), buffers, and
    the fitted parameters of its likelihood. A single theta is repeated where the joint or the data have members.
    """
    if start is None:
        theta = method.initial(joint, key)
    elif isinstance(start, Posterior):
        if type(start.joint) is not type(joint):
            kinds = f"a {type(start.joint).__name__}, and this problem is a {type(joint).__name__}"
            raise ValueError(f"start is the posterior of {kinds}. Start from a posterior of the same problem.")
        start = start.start()
        theta = _same_dtype(joint, start.point())
        if isinstance(joint, Joint) and isinstance(start.joint, Joint):
            joint, theta = _from_posterior(joint, theta, start, start.joint)
    elif isinstance(start, Tensor):
        theta = _with_noise(joint, _same_dtype(joint, start))
    else:
        raise TypeError(f"start must be a Posterior, a tensor (P,) or (M, P), or None. Got {shown(start)}.")
    return joint, _members(joint, theta, data)


def _same_dtype(joint: Target, theta: Tensor) -> Tensor:
    if theta.dtype != joint.dtype:
        raise ValueError(f"start must have the model's dtype {joint.dtype}. Got {theta.dtype}. Convert one of them.")
    return theta.detach().to(joint.device)


def _with_noise(joint: Target, theta: Tensor) -> Tensor:
    """theta with the likelihood's starting parameters appended, where only weights were given."""
    if isinstance(joint, Joint) and joint.likelihood.num_free and theta.dim() and theta.shape[-1] == joint.num_weights:
        free = joint.likelihood.free(theta)
        theta = torch.cat([theta, free.expand(*theta.shape[:-1], -1)], dim=-1)
    return theta


def _from_posterior(joint: Joint, theta: Tensor, start: Posterior, origin: Joint) -> tuple[Joint, Tensor]:
    known = {**origin.network.frozen, **origin.network.layout.unflatten(theta)}
    shapes = _shapes(origin)
    for name, shape in _shapes(joint).items():
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
        frozen={name: known[name].to(joint.device) for name in joint.network.frozen},
        buffers={name: b.to(joint.device) for name, b in (start.buffers or joint.network.buffers).items()},
    )
    joint = dataclasses.replace(joint, network=network)
    weights = joint.network.layout.flatten(known)
    raw = joint.likelihood.free_from(origin.likelihood, weights)
    return joint, torch.cat([weights, raw.expand(*weights.shape[:-1], -1)], dim=-1)


def _shapes(joint: Joint) -> dict[str, tuple[int, ...]]:
    """Every parameter of the network, frozen or not."""
    frozen = {name: tuple(value.shape) for name, value in joint.network.frozen.items()}
    return {**frozen, **{part.name: part.shape for part in joint.network.layout}}


def _members(joint: Target, theta: Tensor, data: Data) -> Tensor:
    """theta, repeated for each member of the joint or the data where it has none of its own; its shape is checked."""
    if theta.dim() not in (1, 2) or theta.shape[-1] != joint.size or not theta.numel():
        raise ValueError(
            f"start must have {joint.size} entries, ({joint.size},) or (members, {joint.size}). "
            f"Got shape {tuple(theta.shape)}."
        )
    if not bool(torch.isfinite(theta).all()):
        where = joint.layout.name_at(int((~torch.isfinite(theta)).nonzero()[0, -1]))
        raise ValueError(
            f"The starting weights must be finite. Got NaN or infinity in '{where}'. Repair or retrain it."
        )
    theta = theta.detach().clone()
    in_data = data.rows.targets.shape[0] if isinstance(data, TensorData) and data.rows.per_member else None
    for owner, members in (("joint", joint.num_members), ("data", in_data)):
        if members is None:
            continue
        if theta.dim() == 1:
            theta = theta.expand(members, -1)
        elif theta.shape[0] != members:
            raise ValueError(
                f"There must be one row of theta for each of the {members} members of the {owner}. "
                f"Got {theta.shape[0]}. Give start, joint and data the same number of members."
            )
    return theta
