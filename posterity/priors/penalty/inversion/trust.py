"""Whether a spline that comes close to a penalty shows that there is a prior, where the family smooths little."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from posterity.priors.penalty.inversion.member import Member
from posterity.priors.penalty.inversion.spline import ForwardFit, forward_fit

# Shares of what r varies by nearby. With three knots to a standard deviation of the family kinks and most jumps of log
# alpha leave up to 5.5e-3 of that, a pole or a spike without end 8e-3 and more.
_LEFT = 6e-3
# Families that leave nothing of fast waves follow every KL to 1e-6 of that; |mu|^3 and |mu|^5 leave 5e-3.
_LEFT_BY_SMOOTH = 1e-4
# A kink of log alpha moves by 0.05 as splines may be rougher, waves that leave no trace in r by 0.6 and more.
_MOVED = 0.1
_KNOTS = 3.0
_SPARSE = 1.21  # distances of knots between means: at more a spline goes through all values, whatever they are


def follows(fit: ForwardFit, targets: Tensor, members: Sequence[Member], smoothness: float, rounding: float) -> bool:
    """Whether what is left of r is little beside what it varies by nearby, however much it varies farther out.

    `rounding` is what r is in error by.
    """
    column = targets.reshape(-1, 1)
    missed = (fit.matrix @ fit.solve(column, smoothness) - column).reshape(targets.shape)
    nearby = _nearby(targets, members, fit.spacing)
    return bool((missed.abs() <= _LEFT_BY_SMOOTH * nearby + rounding).all())


def shows_a_prior(
    fit: ForwardFit, mu: Tensor, targets: Tensor, members: Sequence[Member], smoothness: tuple[float, float]
) -> bool:
    """Whether little is left of r at every mean, wherever the knots are, and log alpha stays the same if rougher.

    `targets` are -r up to a constant for each member, (V, N); `smoothness` is the usual one, and the least.
    """
    if fit.spacing > _SPARSE * fit.step:
        return False
    nearby = _nearby(targets, members, fit.spacing)
    column = targets.reshape(-1, 1)
    fits = (fit, forward_fit(mu, members, between=True))  # a pole at a knot is followed too well
    rough = [one.solve(column, smoothness[1]) for one in fits]
    missed = [(one.matrix @ found - column).reshape(targets.shape) for one, found in zip(fits, rough, strict=True)]
    usual = fit.solve(column, smoothness[0])
    finer = min(1.0, _KNOTS * fit.step / fit.unit)  # what is left of a jump goes with the square of the knots' distance
    left = float((torch.stack(missed).abs() / nearby).max())
    moved = float((fit.spline((rough[0] - usual)[:, 0])(mu).abs() / nearby.amin(0)).max())
    return left <= _LEFT * finer**2 and moved <= _MOVED


def _nearby(targets: Tensor, members: Sequence[Member], spacing: float) -> Tensor:
    return torch.stack([_variation(r, one.spread, spacing) for r, one in zip(targets, members, strict=True)])


def _variation(values: Tensor, spread: float, spacing: float) -> Tensor:
    """By how much values (N,) vary within a standard deviation of the family on either side, at each; never 0."""
    half = max(1, math.ceil(spread / spacing))
    padded = torch.nn.functional.pad(values[None, None], (half, half), mode="replicate")
    high, low = (torch.nn.functional.max_pool1d(sign * padded, 2 * half + 1, 1)[0, 0] for sign in (1.0, -1.0))
    varies = high + low
    return varies.clamp_min(max(1e-6 * float(varies.max()), 1e-9))
