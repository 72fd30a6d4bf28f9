"""Soft thresholding of single weights and of groups: proximal operators of the lasso and the group lasso."""

import torch
from torch import Tensor

_NEWTON_STEPS = 12  # the digits double at each step near the root; see `group_threshold`


def soft_threshold(z: Tensor, threshold: float | Tensor, centre: float = 0.0) -> Tensor:
    """Return argmin over w of (w - z)^2 / 2 + threshold |w - centre|, entry by entry.

    >>> soft_threshold(torch.tensor([3.0, -1.0, 0.5]), 1.0)
    tensor([2., 0., 0.])
    """
    if not centre:
        return z - z.clamp(-threshold, threshold)  # type: ignore[arg-type, unused-ignore]
    distance = z - centre
    return torch.where(distance.abs() > threshold, z - distance.sign() * threshold, centre)


def group_threshold(z: Tensor, threshold: float | Tensor) -> Tensor:
    """Return argmin over w of sum of (w_i - z_i)^2 / (2 a_i) + ||w|| for each group z (..., n), with a = `threshold`.

    A scalar threshold, or (..., 1), is shared by the group: w = z max(0, 1 - a / ||z||). With thresholds (..., n), w is
    zero where sum (z_i / a_i)^2 <= 1, else w_i = z_i r / (r + a_i), where r = ||w|| solves
    phi(r) = sum z_i^2 / (r + a_i)^2 = 1. Newton's method on phi^(-1/2), which is concave and increasing, converges from
    below without overshooting, from a start at which no |z_i| exceeds r + a_i. The number of steps is fixed, so that
    the work does not depend on the data.

    >>> group_threshold(torch.tensor([[3.0, 4.0], [0.3, 0.4]]), 1.0)
    tensor([[2.4000, 3.2000],
            [0.0000, 0.0000]])
    >>> group_threshold(torch.tensor([3.0, 4.0]), torch.tensor([0.0, 1.0]))  # the first is not shrunk
    tensor([3.0000, 3.2638])
    """
    length = torch.linalg.vector_norm(z, dim=-1, keepdim=True)
    if not isinstance(threshold, Tensor) or not threshold.dim() or threshold.shape[-1] == 1:
        return z * torch.where(length > threshold, 1.0 - threshold / length, 0.0)
    size, least = z.abs(), torch.finfo(z.dtype).tiny
    zero = (size / threshold.clamp_min(least)).square().sum(-1, keepdim=True) <= 1.0
    r = torch.maximum(length - threshold.amax(-1, keepdim=True), (size - threshold).amax(-1, keepdim=True))
    r = r.clamp_min(0.0)
    for _ in range(_NEWTON_STEPS):
        shifted = (r + threshold).clamp_min(least)
        shares = (size / shifted).square()
        phi = shares.sum(-1, keepdim=True)
        r = r + phi * (phi.sqrt() - 1.0).clamp_min(0.0) / (shares / shifted).sum(-1, keepdim=True)
    return torch.where(zero, torch.zeros_like(z), z * (r / (r + threshold).clamp_min(least)))
