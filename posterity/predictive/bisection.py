"""Quantiles of distributions of which only the distribution function is known."""

from collections.abc import Callable

import torch
from torch import Tensor

_BISECTIONS = 64  # each halves the bracket: enough for every bit of a float64
_DOUBLINGS = 2000  # the range of a float64


def bisected_quantile(cdf: Callable[[Tensor], Tensor], mean: Tensor, std: Tensor, p: float) -> Tensor:
    """The smallest y with cdf(y) >= p, entry by entry in float64, searched from mean and standard deviation.

    >>> bisected_quantile(torch.special.ndtr, torch.tensor([0.1]), torch.tensor([2.0]), 0.975)
    tensor([1.9600], dtype=torch.float64)
    """
    # A bracket that is a whole number plus and minus a power of two is halved at whole numbers, until these
    # are an end of it. So the quantile of a count, where the mixture jumps, comes out whole.
    centre = mean.double().floor()
    width = torch.exp2(std.double().nan_to_num(1.0, posinf=1.0).clamp_min(1e-300).log2().ceil())
    for _ in range(_DOUBLINGS):
        lower, upper = centre - width, centre + width
        narrow = ((cdf(lower) >= p) | ~(cdf(upper) >= p)) & torch.isfinite(centre)
        if not bool(narrow.any()):
            break
        width = torch.where(narrow, 2.0 * width, width)
    for _ in range(_BISECTIONS):
        middle = 0.5 * (lower + upper)
        below = ~(cdf(middle) >= p)
        lower, upper = torch.where(below, middle, lower), torch.where(below, upper, middle)
    return upper
