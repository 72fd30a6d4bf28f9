"""Minimisers of a quadratic with a kinked penalty, one number or one group at a time."""

import torch
from torch import Tensor

_ROUNDS = 12  # of Newton: digits double at each once it is near; see `group_threshold`


def soft_threshold(z: Tensor, threshold: float | Tensor, centre: float = 0.0) -> Tensor:
    """argmin over w of (w - z)^2 / 2 + threshold |w - centre|, entry by entry: z moved towards it, and no further.

    >>> soft_threshold(torch.tensor([3.0, -1.0, 0.5]), 1.0)
    tensor([2., 0., 0.])
    """
    distance = z - centre
    return torch.where(distance.abs() > threshold, z - distance.sign() * threshold, centre)


def group_threshold(z: Tensor, threshold: float | Tensor) -> Tensor:
    """argmin over w of sum of (w_i - z_i)^2 / (2 a_i) + ||w|| for each group z (..., n), with a = `threshold`.

    A threshold that is a number, or (..., 1), is one for the group: w = z max(0, 1 - a / ||z||). With one for each
    weight, (..., n), w is zero where sum (z_i / a_i)^2 <= 1, else w_i = z_i r / (r + a_i), where r = ||w|| solves
    phi(r) = sum z_i^2 / (r + a_i)^2 = 1. Newton's method on phi^(-1/2), which is concave and rises, comes to the root
    from below without ever passing it; the start, at which no |z_i| exceeds r + a_i, leaves it little way to go. The
    number of rounds is fixed, so that the work does not depend on the numbers.

    >>> group_threshold(torch.tensor([[3.0, 4.0], [0.3, 0.4]]), 1.0)
    tensor([[2.4000, 3.2000],
            [0.0000, 0.0000]])
    >>> group_threshold(torch.tensor([3.0, 4.0]), torch.tensor([0.0, 1.0]))  # the first may not move
    tensor([3.0000, 3.2638])
    """
    length = torch.linalg.vector_norm(z, dim=-1, keepdim=True)
    if not isinstance(threshold, Tensor) or not threshold.dim() or threshold.shape[-1] == 1:
        return torch.where(length > threshold, z * (1.0 - threshold / length), torch.zeros_like(z))
    size, least = z.abs(), torch.finfo(z.dtype).tiny
    gone = (size / threshold.clamp_min(least)).square().sum(-1, keepdim=True) <= 1.0
    start = torch.maximum(length - threshold.amax(-1, keepdim=True), (size - threshold).amax(-1, keepdim=True))
    r = start.clamp_min(0.0)
    for _ in range(_ROUNDS):
        shifted = (r + threshold).clamp_min(least)
        shares = (size / shifted).square()
        phi = shares.sum(-1, keepdim=True)
        r = r + phi * (phi.sqrt() - 1.0).clamp_min(0.0) / (shares / shifted).sum(-1, keepdim=True)
    return torch.where(gone, torch.zeros_like(z), z * (r / (r + threshold).clamp_min(least)))
