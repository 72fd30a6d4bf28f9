"""Quantiles of beta distributions."""

from functools import cache

import numpy as np
import torch
from torch import Tensor

_NODES = 128  # of the Gauss-Legendre rule on each side of the mode
_STEPS = 60  # bisection alone would be done by then; Newton takes about five
_BUDGET = 2**20  # densities held at once


def beta_quantile(p: float, a: Tensor, b: Tensor) -> Tensor:
    """The x with P(X <= x) = p for X ~ Beta(a, b), entry by entry: tensors (...) of at least 1 -> (...), in float64.

    In u = logit x the density exp(a u - (a + b) log(1 + e^u)) / B(a, b) is smooth and log-concave for all a and b, so
    a Gauss-Legendre rule from where its mass begins gives the distribution function to rounding, and Newton steps kept
    inside a bracket invert it.

    >>> beta_quantile(0.25, torch.tensor([1.0, 2.0]), torch.tensor(1.0))  # x = p and x^2 = p
    tensor([0.2500, 0.5000], dtype=torch.float64)
    """
    a, b = torch.broadcast_tensors(a.to(torch.float64), b.to(torch.float64))  # type: ignore[no-untyped-call]
    rows = max(1, _BUDGET // _NODES)
    pieces = zip(torch.split(a.reshape(-1), rows), torch.split(b.reshape(-1), rows), strict=True)
    return torch.cat([_quantile(p, *piece) for piece in pieces]).reshape(a.shape)


def _quantile(p: float, a: Tensor, b: Tensor) -> Tensor:
    mode = a.log() - b.log()  # of u
    nodes, weights = (values.to(a.device)[:, None] for values in _rule())

    def height(u: Tensor) -> Tensor:
        """Density of u, up to a constant: 1 at the mode."""
        rest = torch.nn.functional.softplus(u) - torch.nn.functional.softplus(mode)
        return (a * (u - mode) - (a + b) * rest).exp()

    def area(u: Tensor) -> Tensor:
        """Integral of `height` from the mode to u."""
        return (weights * height(mode + nodes * (u - mode))).sum(0) * (u - mode)

    scale = (torch.polygamma(1, a) + torch.polygamma(1, b)).sqrt()
    low = mode - (12.0 + 30.0 / a.sqrt()) * scale  # beyond, the tail exp(a u) and its mirror image have no mass
    high = mode + (12.0 + 30.0 / b.sqrt()) * scale
    below = -area(low)
    wanted = p * (below + area(high)) - below
    u = mode + scale * torch.special.ndtri(torch.tensor(p, dtype=torch.float64, device=a.device))
    for _ in range(_STEPS):
        miss = area(u) - wanted
        low, high = torch.where(miss < 0, u, low), torch.where(miss < 0, high, u)
        step = u - miss / height(u)
        new = torch.where((step >= low) & (step <= high), step, 0.5 * (low + high))
        moved, u = (new - u).abs(), new
        if bool((moved <= 1e-7 * scale).all()):  # the error is now about the square of that
            break
    return torch.sigmoid(u)


@cache
def _rule() -> tuple[Tensor, Tensor]:
    """Nodes and weights of the Gauss-Legendre rule on (0, 1)."""
    nodes, weights = np.polynomial.legendre.leggauss(_NODES)
    return torch.from_numpy(0.5 * (nodes + 1.0)), torch.from_numpy(0.5 * weights)
