"""A module of its own that holds given weights."""

import torch
from torch import Tensor, nn

from posterity.model.module import copied
from posterity.model.network import Buffers, Network


def filled(network: Network, theta: Tensor, buffers: Buffers | None = None) -> nn.Module:
    """A new module in evaluation mode with the weights theta (P,), the frozen ones, and buffers (or the network's own).

    >>> filled(Network(nn.Linear(2, 1)), torch.tensor([3.0, 4.0, 5.0])).weight
    Parameter containing:
    tensor([[3., 4.]], requires_grad=True)
    """
    module = copied(network.module).eval()  # a step may have left batch norm in training mode
    values = {**network.frozen, **network.buffers, **(buffers or {}), **network.layout.unflatten(theta)}
    own: dict[str, Tensor] = dict(module.named_parameters())
    own.update(module.named_buffers())
    with torch.no_grad():
        for name, value in values.items():
            own[name].copy_(value)
    return module
