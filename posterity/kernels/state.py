"""The state of a chain: position, log density and gradient, in whitened coordinates."""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

Target: TypeAlias = Callable[[Tensor], tuple[Tensor, Tensor]]
"""A log density of many chains at once: positions (C, P) -> values (C,), gradients (C, P)."""


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


def spread(scale: Tensor, whitened: Tensor) -> Tensor:
    """L z of z (C, P), with L the scale: its diagonal (1 or C, P), or a lower factor (1 or C, P, P)."""
    return scale * whitened if scale.dim() == 2 else _times(whitened, scale.mT)


def gathered(scale: Tensor, grad: Tensor) -> Tensor:
    """L^T g: the gradient in z of a function of L z whose gradient is g."""
    return scale * grad if scale.dim() == 2 else _times(grad, scale)


def _times(vectors: Tensor, matrices: Tensor) -> Tensor:
    if matrices.shape[0] == 1:
        return vectors @ matrices[0]
    return torch.bmm(vectors.unsqueeze(1), matrices).squeeze(1)


def whitened(target: Target, start: Tensor, scale: Tensor) -> Target:
    """The log density of z, where position = start + L z.

    A sampler that moves z by momenta of unit mass moves the position by momenta of mass (L L^T)^-1: with L L^T near
    the covariance of the target all directions are of one size. Steps are measured from `start`, so that nothing is
    rounded where positions are large beside their spread, and z = 0 is the start to the bit.
    """

    def of_whitened(z: Tensor) -> tuple[Tensor, Tensor]:
        value, grad = target(start + spread(scale, z))
        return value, gathered(scale, grad)

    return of_whitened
