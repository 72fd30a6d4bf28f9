"""Where chains stand, and the density that they walk on."""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

# A log density of many chains at once: positions (C, P) -> values (C,), gradients (C, P).
Target: TypeAlias = Callable[[Tensor], tuple[Tensor, Tensor]]


class Place(NamedTuple):
    """Positions (C, P) of chains, with the log density (C,) and its gradient (C, P) there."""

    position: Tensor
    value: Tensor
    grad: Tensor


class Move(NamedTuple):
    """What a transition was like, for each chain (C,).

    `accept` is the probability of acceptance (for trees: the mean over the points looked at), `energy` minus the log
    density of position and momentum at the start, `divergent` whether the integration left the level of the energy;
    `leapfrogs` counts gradients, `depth` doublings of a tree (0 where there is none).
    """

    accept: Tensor
    energy: Tensor
    divergent: Tensor
    leapfrogs: Tensor
    depth: Tensor


def place_at(target: Target, position: Tensor) -> Place:
    """The place at these positions."""
    return Place(position, *target(position))


def chosen(take: Tensor, one: Place, other: Place) -> Place:
    """For each chain the one place where `take` (C,), else the other."""
    row = take.unsqueeze(-1)
    position, grad = torch.where(row, one.position, other.position), torch.where(row, one.grad, other.grad)
    return Place(position, torch.where(take, one.value, other.value), grad)
