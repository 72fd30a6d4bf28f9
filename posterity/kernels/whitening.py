"""Mass matrices as changes of coordinates, so that kernels know unit mass only."""

import torch
from torch import Tensor

from posterity.kernels.place import Target


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
