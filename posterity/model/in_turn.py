"""Members one after the other, each with its backward pass before the next begins."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from posterity.model.batch import Batch
from posterity.model.network import Buffers, Network

One: TypeAlias = Callable[[Tensor, Batch, Buffers, Tensor], tuple[Tensor, Buffers]]


def in_turn(
    network: Network, theta: Tensor, batch: Batch, buffers: Buffers | None, grad: Tensor, ones: Sequence[One]
) -> tuple[Tensor, Buffers]:
    """Values (M,) and buffers of the members of theta (M, P), to whose gradients (M, P) each of `ones` adds its own.

    It takes a member's theta (P,), batch, buffers and place for the gradient. Only one member's activations are there
    at a time.
    """
    buffers = network.buffers if buffers is None else buffers
    found = [
        one(theta[index], batch.member(index), network.buffers_of(buffers, index), grad[index])
        for index, one in enumerate(ones)
    ]
    after = {name: torch.stack([own[name] for _, own in found]) for name in buffers}
    return torch.stack([value for value, _ in found]), after
