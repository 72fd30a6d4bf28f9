"""Gauss-Legendre rules on panels that are halved until that changes nothing: for densities with kinks."""

from collections.abc import Callable
from functools import cache

import numpy as np
import torch
from torch import Tensor

_NODES = 16  # of a panel
_PANELS = 126
_MOST_PANELS = 700
_HALVINGS = 44  # of a panel: what it then has of a kink, or of a pole that integrates, is below all digits
_ROUNDING = 16.0  # times epsilon: panels that differ by so much agree
_MOST_MASS = 1 / 48  # of a panel: nodes lie close where the mass is, for what is integrated may have kinks, too
_WANTED = 1e-9  # of the integral


def panelled(density: Callable[[Tensor], Tensor], low: float, high: float) -> Tensor:
    """Edges (P + 1,) of panels on which the rule integrates `density` from `low` to `high`; one of them at 0, if there.

    A panel is halved where the integrals of p or of p log p over its halves do not add up to its own. A ValueError
    where that does not come to an end.

    >>> edges = panelled(lambda z: torch.exp(-(z - 0.3).abs()), -40.0, 40.0)
    >>> points, weights = panel_rule(edges)
    >>> round(float(weights @ torch.exp(-(points - 0.3).abs())), 12)
    2.0
    """
    edges = torch.linspace(low, high, _PANELS + 1, dtype=torch.float64, device="cpu")
    if low < 0.0 < high:
        edges = torch.cat([edges[edges.abs() > 1e-9 * (high - low)], edges.new_zeros(1)]).sort().values
    left, right = edges[:-1], edges[1:]
    settled: list[Tensor] = []  # left edges of panels that are done with
    doubt = total = 0.0
    for halvings in range(_HALVINGS + 1):
        middle = 0.5 * (left + right)
        own, epsilon = _integrals(density, left, right)  # (2, P)
        halves = _integrals(density, torch.cat([left, middle]), torch.cat([middle, right]))[0]
        halves = halves.reshape(2, 2, -1).sum(1)
        total = total or float(halves[0].sum())  # all of it at first
        gap = (own - halves).abs()
        rough = (gap > _ROUNDING * epsilon * (halves.abs() + 1e-2 * total)).any(0)
        bad = rough | (halves[0] > _MOST_MASS * total)
        settled.append(left[~bad])
        doubt += float(gap[:, ~bad].amax(0).sum())
        many = sum(map(len, settled)) + 2 * int(bad.sum()) > _MOST_PANELS
        if many or halvings == _HALVINGS or not bool(bad.any()):
            break
        left, middle, right = left[bad], middle[bad], right[bad]
        left, right = torch.cat([left, middle]), torch.cat([middle, right])
    gap, left = gap[:, bad].amax(0), left[bad]
    doubt += float(gap.sum())
    if doubt > max(_WANTED, _PANELS * epsilon) * total:
        raise ValueError(
            "Translation.density must be smooth but for a few kinks, or its integrals are not known to nine digits. "
            f"Got one with integrals known to {doubt / total:.1g} between {low:g} and {high:g}, least near "
            f"{float(left[gap.argmax()]):.6g}. Give lowest and highest close around it, or standard_moments."
        )
    return torch.cat([*settled, left, edges[-1:]]).sort().values


def panel_rule(edges: Tensor) -> tuple[Tensor, Tensor]:
    """Nodes in all panels and their weights, (Q,) each."""
    points, weights = _legendre()
    half = 0.5 * edges.diff().unsqueeze(-1)
    return (edges[:-1].unsqueeze(-1) + half * (points + 1.0)).reshape(-1), (half * weights).reshape(-1)


def halved(edges: Tensor) -> Tensor:
    """The edges of twice as many panels."""
    return torch.cat([edges, 0.5 * (edges[:-1] + edges[1:])]).sort().values


def _integrals(density: Callable[[Tensor], Tensor], left: Tensor, right: Tensor) -> tuple[Tensor, float]:
    """Over each panel of the density and of p log p (2, P), and the epsilon of the numbers that it is in."""
    points, weights = _legendre()
    half = 0.5 * (right - left).unsqueeze(-1)
    values = density((left.unsqueeze(-1) + half * (points + 1.0)).reshape(-1))
    both = torch.stack([values.double(), torch.xlogy(values.double(), values.double())]).reshape(2, len(left), -1)
    return (half * weights * both).sum(-1), torch.finfo(values.dtype).eps


@cache
def _legendre() -> tuple[Tensor, Tensor]:
    """Nodes between -1 and 1 and their weights."""
    points, weights = np.polynomial.legendre.leggauss(_NODES)
    return torch.tensor(points, dtype=torch.float64, device="cpu"), torch.tensor(
        weights, dtype=torch.float64, device="cpu"
    )
