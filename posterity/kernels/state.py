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
    """Statistics of a transition, for each chain (C,).

    `accept` is the probability of acceptance (for trees: the mean over the points visited), `energy` minus the log
    density of position and momentum at the start, `divergent` whether the integrator lost the trajectory; `leapfrogs`
    counts gradients, `depth` doublings of a tree (0 without one).
    """

    accept: Tensor
    energy: Tensor
    divergent: Tensor
    leapfrogs: Tensor
    depth: Tensor


def place_at(target: Target, position: Tensor) -> Place:
    """Evaluate the target at these positions."""
    return Place(position, *target(position))


def chosen(take: Tensor, new: Place, old: Place) -> Place:
    """The new place of each chain where `take` (C,), else the old."""
    row = take.unsqueeze(-1)
    position, grad = torch.where(row, new.position, old.position), torch.where(row, new.grad, old.grad)
    return Place(position, torch.where(take, new.value, old.value), grad)


def spread(scale: Tensor, whitened: Tensor) -> Tensor:
    """L z for z (C, P), where `scale` is L: a diagonal (1 or C, P), or a lower factor (1 or C, P, P)."""
    return scale * whitened if scale.dim() == 2 else _times(whitened, scale.mT)


def gathered(scale: Tensor, grad: Tensor) -> Tensor:
    """L^T g: the gradient in z of a function of L z with gradient g."""
    return scale * grad if scale.dim() == 2 else _times(grad, scale)


def unspread(scale: Tensor, vectors: Tensor) -> Tensor:
    """z = L^-1 x for x (C, P): the inverse of `spread`."""
    if scale.dim() == 2:
        return vectors / scale
    rows = vectors.reshape(len(scale), -1, vectors.shape[-1])
    solved: Tensor = torch.linalg.solve_triangular(scale, rows.mT, upper=False)
    return solved.mT.reshape(vectors.shape)


def _times(vectors: Tensor, matrices: Tensor) -> Tensor:
    return vectors @ matrices[0] if len(matrices) == 1 else torch.bmm(vectors.unsqueeze(1), matrices).squeeze(1)


def whitened(target: Target, start: Tensor, scale: Tensor) -> Target:
    """The log density of z, where position = start + L z.

    A sampler that moves z by momenta of unit mass moves the position by momenta of mass (L L^T)^-1: with L L^T near
    the covariance of the target all directions have the same scale. z is measured from `start`, so that positions that
    are large beside their spread are not rounded, and z = 0 is the start to the bit.
    """

    def of_whitened(z: Tensor) -> tuple[Tensor, Tensor]:
        value, grad = target(start + spread(scale, z))
        return value, gathered(scale, grad)

    return of_whitened
