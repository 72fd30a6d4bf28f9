"""The improved variational online Newton step on flat vectors, in place."""

import math

import torch
from torch import Tensor

# Numbers of each vector that are worked on at a time: five such pieces stay in the last-level cache from pass to pass,
# and smaller ones would cost more in calls than a nearer cache saves. On a GPU there is one piece.
_PIECE = 1 << 19


def online_newton_(
    curvature: Tensor,
    scale: Tensor,
    momentum: Tensor,
    pull: Tensor,
    product: Tensor,
    decay: float | Tensor,
    *,
    weight: float,
    rate: float,
    pull_factor: float,
    bend: float = 0.5,
    radius: float = math.inf,
) -> None:
    """Move the curvature by an estimate of the Hessian, and put the mean's step in place of `product`.

    `curvature` is s = h + decay, h the Hessian of the data's loss and `decay` that of the prior's; `scale` is s^(-1/2)
    before and after. The estimate is h^ = weight * product / scale, product being gradient times standard noise. Then

    - s <- s (1 + x + bend x^2) with x = rate (h^ + decay - s) / s; with a bend of 1/2 at least half of s is left,
      whatever the estimate, and with 0 a rate of 1 takes the estimate itself;
    - product <- (momentum + pull_factor * pull) / s, between -radius and radius.

    All vectors are contiguous and of one shape, as is the decay unless it is a number (Shen et al. 2024, Algorithm 1,
    with rate = 1 - beta2; for a decay that stays the same, h^ + decay - s is their h^ - h).

    >>> s, product = torch.full((1,), 4.0), torch.ones(1)
    >>> vectors = torch.full((1,), 0.5), torch.zeros(1), torch.ones(1)
    >>> online_newton_(s, *vectors, product, 1.0, weight=2.0, rate=0.5, pull_factor=1.0)
    >>> s, product  # h = 3, h^ = 4: 4 + 0.5 + 0.125 / 4, and 1 / s
    (tensor([4.5312]), tensor([0.2207]))
    """
    size = _PIECE if curvature.device.type == "cpu" else max(1, curvature.numel())
    vectors = [curvature, scale, momentum, pull, product]
    if isinstance(decay, Tensor):
        vectors.append(decay)
    below = curvature.new_full((), -rate)
    for pieces in zip(*(torch.split(vector.view(-1), size) for vector in vectors), strict=True):
        s, t, m, c, p = pieces[:5]
        if isinstance(decay, Tensor):
            p.addcmul_(pieces[5], t, value=1.0 / weight)
        else:
            p.add_(t, alpha=decay / weight)
        torch.addcmul(below, p, t, value=rate * weight, out=p)  # x
        s.addcmul_(s, torch.addcmul(p, p, p, value=bend, out=t))
        torch.rsqrt(s, out=t)
        torch.add(m, c, alpha=pull_factor, out=p).mul_(t).mul_(t)
        if radius < math.inf:
            p.clamp_(-radius, radius)
