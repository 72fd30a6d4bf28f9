"""The data term of a joint: its value, and its gradient, which is added to that of the prior."""

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from posterity.model.backward import Leaves, add_gradients, batch_total, side_by_side
from posterity.model.data import Batch
from posterity.model.network import Buffers
from posterity.processes import Group

if TYPE_CHECKING:
    from posterity.model.joint import Joint


def add_data_grad(
    joint: "Joint",
    theta: Tensor,
    batch: Batch,
    buffers: Buffers | None,
    grad: Tensor,
    train: bool,
    size: int | None = None,
) -> tuple[Tensor, Buffers]:
    """Return the tempered log-likelihood and the buffers; add its gradient to `grad`.

    The rows are a part of `size` rows that stand for all data (None: they are these).
    """
    network = joint.network
    if network.sharing is not None:
        return _add_shared(joint, network.sharing, theta, batch, buffers, grad, train)
    share = joint.num_data / (batch.size if size is None else size)
    if theta.dim() == 1:
        leaves = Leaves.at(network, theta, grad)
        return add_gradients(network, joint.likelihood, leaves, batch, buffers, joint.powers[0] * share, train)
    if network.one_by_one:  # activations of few members at a time are in memory
        own = network.buffers if buffers is None else buffers
        members = [(joint.member(i), theta[i], batch.member(i), network.buffers_of(own, i)) for i in range(len(theta))]
        passes = [partial(add_data_grad, *member, grad[i], train, size) for i, member in enumerate(members)]
        each = side_by_side(passes, theta.device)
        after = {name: torch.stack([member_buffers[name] for _, member_buffers in each]) for name in each[0][1]}
        return torch.stack([value for value, _ in each]), after
    weights, raw = joint.split(theta.detach())
    views = [view.requires_grad_() for view in network.views(weights)]
    slots = [*network.views(grad[..., : joint.num_weights]), grad[..., joint.num_weights :]]
    raw.requires_grad_()

    def run(rows: Batch) -> tuple[Tensor, Buffers]:
        total, after = batch_total(network, joint.likelihood, views, raw, rows, buffers, members=True, train=train)
        factor = torch.ones_like(total) * (joint.powers[0] * share)
        # The leaves are not dense, so autograd would not add to their gradients in place.
        parts = torch.autograd.grad(total, [*views, raw], factor, allow_unused=True)
        for slot, part in zip(slots, parts, strict=True):
            if part is not None:
                slot.add_(part)
        return total.detach() * factor, after

    return network.passes.over(batch, run)


def _add_shared(
    joint: "Joint", processes: Group, theta: Tensor, batch: Batch, buffers: Buffers | None, grad: Tensor, train: bool
) -> tuple[Tensor, Buffers]:
    """As `add_data_grad`, with the rows shared by several processes."""
    alone = joint.alone

    def part(low: int, high: int) -> list[Tensor]:
        own = torch.zeros_like(theta, memory_format=torch.contiguous_format)
        value, _ = add_data_grad(alone, theta, batch.rows(low, high), buffers, own, train, batch.size)
        return [own, value]

    added, value = processes.total(part, batch.size)
    grad.add_(added)
    return value, {} if buffers is None else buffers
