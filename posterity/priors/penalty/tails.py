"""How a log density goes on beyond where it is known."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

_NEAR, _FAR = 0.9, 0.75  # shares of the way to the end where the fall is measured
_MOST = 2.0  # tails thinner than a normal's are not guessed


def extended(log_density: Callable[[Tensor], Tensor], reach: float) -> Callable[[Tensor], Tensor]:
    """A log density known between -`reach` and `reach`, continued on either side as a - c |t|^p.

    c and p follow from what it loses over the last tenth of the way to the end, and over the tenth before three
    quarters of it. p is kept between 0, a power of |t|, and 2, a normal; 1 is an exponential.

    >>> known = extended(lambda t: -3.0 * t.clamp(-4.0, 4.0).abs(), 4.0)
    >>> known(torch.tensor([1.0, 10.0, -20.0], dtype=torch.float64)).round()
    tensor([ -3., -30., -60.], dtype=torch.float64)
    """
    ends = torch.tensor([1.0, _NEAR, _FAR, _NEAR * _FAR], dtype=torch.float64, device="cpu") * reach
    tails = []
    for sign in (-1.0, 1.0):
        values = log_density(sign * ends).tolist()
        outer, inner = values[0] - values[1], values[2] - values[3]
        power = -math.log(outer / inner) / math.log(_FAR) if outer < 0.0 and inner < 0.0 else 0.0
        power = min(max(power, 1e-6), _MOST)
        tails.append((-outer / math.expm1(power * math.log(_NEAR)), power))  # the fall from 0 to the end, and p

    def continued(t: Tensor) -> Tensor:
        inside = log_density(t.clamp(-reach, reach))
        beyond = (t.abs() / reach).clamp_min(1.0).log()
        for sign, (fall, power) in zip((-1.0, 1.0), tails, strict=True):
            inside = inside + torch.where(sign * t > reach, fall * torch.expm1(power * beyond), 0.0)
        return inside

    return continued
