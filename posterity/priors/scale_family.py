"""Priors whose scale has a closed-form optimum: those with a homogeneous -log p about their mode."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from posterity.numerics.layout import Layout
from posterity.priors.fan import ScaleRule
from posterity.priors.group_lasso import GroupLasso
from posterity.priors.laplace import Laplace
from posterity.priors.layerwise import Layerwise
from posterity.priors.normal import Normal
from posterity.priors.prior import Prior


def degree(prior: Prior) -> int | None:
    """k of a prior whose A(w) = log p(mode) - log p(mode + w) is homogeneous, A(w / s) = A(w) / s^k; None without one.

    With n weights and every scale multiplied by s, such a prior is const tau^(n / k) exp(-tau A(w)) for tau = s^-k.

    >>> degree(Normal()), degree(Laplace()), degree(GroupLasso())
    (2, 1, 1)
    """
    if isinstance(prior, Normal):
        return 2
    return 1 if isinstance(prior, (Laplace, GroupLasso)) else None


def penalty(prior: Prior, away: Tensor, power: int, spread: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """log p(0) and A(w) of a homogeneous prior of degree `power` with mode zero, (..., n) -> (...) each, in float64.

    With `spread` it is E A for independent w ~ N(away, spread^2). A is taken at w / r, where r makes the two terms
    comparable, and multiplied by r^k: the difference keeps its digits for weights far below the prior's scale.
    """
    with torch.no_grad():
        squares = away.square() if spread is None else away.square() + spread.square()
        squares = squares.sum(-1, keepdim=True) / prior.variance(away).sum(-1, keepdim=True)
        ratio = torch.where(squares > 0.0, squares.sqrt(), torch.ones_like(squares))  # (..., 1)
        highest = prior.log_prob(torch.zeros_like(away))
    there = away / ratio
    value = prior.log_prob(there) if spread is None else -prior.cross_entropy(there, spread / ratio)
    return highest.double(), (highest - value).double() * ratio.squeeze(-1).double() ** power


def centred(prior: Prior) -> tuple[Prior, float | Tensor]:
    """A homogeneous prior with its mode moved to zero, and the mode: a number, (P,) or (M, P)."""
    if isinstance(prior, (Normal, Laplace)):
        return replace(prior, mean=0.0), prior.mean
    return prior, 0.0


def log_scale(prior: Prior) -> Tensor:
    """Logs of a homogeneous prior's scales, () or as the scales are, in float64: -log rate for a group lasso."""
    if isinstance(prior, GroupLasso):
        return -torch.as_tensor(prior.rate, dtype=torch.float64).log()
    assert isinstance(prior, (Normal, Laplace))
    return torch.as_tensor(prior.scale, dtype=torch.float64).log()


def rescaled(prior: Prior, factor: float) -> Prior:
    """A homogeneous prior, or a `Layerwise` of such, with every scale multiplied.

    >>> rescaled(GroupLasso(rate=3.0), 2.0).rate
    1.5
    """
    if isinstance(prior, Layerwise):
        return Layerwise({pattern: _rescaled_rule(rule, factor) for pattern, rule in prior.rules.items()})
    if isinstance(prior, GroupLasso):
        return replace(prior, rate=_exact(prior.rate) / factor)
    assert isinstance(prior, (Normal, Laplace))
    multiplied: Any = _exact(prior.scale) * factor
    return replace(prior, scale=multiplied)


def _exact(value: float | Tensor) -> float | Tensor:
    """In float64, so that many steps do not add up their rounding."""
    return value.double() if isinstance(value, Tensor) else value


def _rescaled_rule(rule: Prior | ScaleRule, factor: float) -> Prior | ScaleRule:
    return replace(rule, gain=rule.gain * factor) if isinstance(rule, ScaleRule) else rescaled(rule, factor)


def by_tensor(prior: Prior, layout: Layout) -> tuple[Prior, ...]:
    """The prior of each tensor alone, not bound: the rules of a `Layerwise`, the slices of a normal's scales."""
    if isinstance(prior, Layerwise):
        return prior.by_tensor(layout)
    if isinstance(prior, Normal):
        return tuple(
            Normal(_sliced(prior.scale, part.offset, part.size, 2), _sliced(prior.mean, part.offset, part.size, 1))
            for part in layout
        )
    return tuple(prior for _ in layout)


def _sliced(value: float | Tensor, offset: int, size: int, least: int) -> float | Tensor:
    """A hyper-parameter's part for some weights, where it has their axis, as it does from `least` axes on."""
    if not isinstance(value, Tensor) or value.dim() < least:
        return value
    return value[..., offset : offset + size]
