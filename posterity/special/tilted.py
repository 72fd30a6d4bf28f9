"""Moments of a normal density times a positive factor, by adaptive quadrature."""

import math
from collections.abc import Callable
from functools import cache
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

LogFactor: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""(points (K, n), rows (n,)) -> log factors (K, n), each of the row of its column."""

_ROWS = 4096  # rows at a time: bounds the memory
_GRID = 33  # points of a search for the peak; odd, so that the centre is one of them
_WIDE = 10.0  # standard deviations on either side of the start of the search
_SEARCHES = 80  # successive grids, each a sixteenth as wide as the previous one
_OFF_CENTRE = 0.0618  # standard deviations: the edge of a panel at the mean would hide a step of the factor there
_REACH = 9.5  # standard deviations around a peak: a log-concave product has fallen by exp(-45) there
_PANELS = 5  # on either side of a peak, at first
_NODES = 16  # of the Gauss-Legendre rule of each panel, exact for polynomials of twice the degree
_TAIL = 1e-8  # of an integral, up to which the last two Legendre coefficients of a panel count as zero
_DEPTH = 60  # halvings
_MOST = 500  # panels a row at once: more are needed only where rounding makes the factor rough


def tilted_moments(
    log_factor: LogFactor, mean: Tensor, variance: Tensor, peaks: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log Z, mean and variance of g(a) N(a; mean, variance) / Z for each row, (n,), in float64.

    `log_factor(points, rows)` gives log g at points (K, m) of the rows (m,). Where it is not concave, `peaks` (n,) are
    places where g is highest: the product may have a second, narrow peak there. A search on grids finds each peak and
    the width over which the log falls by one; panels that widen from there cover all of the mass, and are halved until
    a polynomial fits the integrand on each. So moments are right to about 1e-12, however steep the factor or far its
    tail. They are NaN where the product is zero or infinite wherever it was looked at.

    >>> zero = torch.zeros(1, dtype=torch.float64)
    >>> moments = tilted_moments(lambda a, rows: -0.5 * (a - 2.0) ** 2, zero, zero + 1.0)  # two normal densities
    >>> [round(float(value), 12) for value in moments[1:]]
    [1.0, 0.5]
    """
    parts = []
    for low in range(0, len(mean), _ROWS):
        rows = torch.arange(low, min(low + _ROWS, len(mean)), device=mean.device)
        parts.append(_moments(log_factor, mean, variance, peaks, rows))
    log_normaliser, centre, spread = torch.cat(parts, dim=1) if parts else mean.new_zeros(3, 0)
    return log_normaliser, centre, spread


def _moments(log_factor: LogFactor, mean: Tensor, variance: Tensor, peaks: Tensor | None, rows: Tensor) -> Tensor:
    """Return log Z, mean and variance of these rows, (3, n)."""
    own_mean, own_variance = mean[rows], variance[rows]

    def log_product(away: Tensor, place: Tensor) -> Tensor:
        """Return log(g N) without the constant of N, at distances (K, m) from the means of the rows at these places."""
        log = log_factor(own_mean[place] + away, rows[place]) - 0.5 * away.square() / own_variance[place]
        return log.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf)

    scale = own_variance.sqrt()
    starts = [_OFF_CENTRE * scale, *([] if peaks is None else [peaks[rows] - own_mean])]
    found = [_peak(log_product, start, _WIDE * scale) for start in starts]
    best = torch.stack([top for _, _, top in found]).argmax(0)
    centre, width, top = (torch.stack(values).gather(0, best[None])[0] for values in zip(*found, strict=True))
    edges = torch.cat([_edges(*peak[:2], _REACH * scale) for peak in found]).sort(dim=0).values  # (E, n)
    sums = _integrals(log_product, edges, centre, width, top)  # (3, n)
    first = sums[1] / sums[0]
    log_normaliser = top + (sums[0] * width).log() - 0.5 * (2.0 * math.pi * own_variance).log()
    spread = width.square() * (sums[2] / sums[0] - first.square())
    return torch.stack([log_normaliser, own_mean + centre + width * first, spread])


def _peak(log_product: LogFactor, start: Tensor, reach: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the highest point found from `start` (n,), a width over which the log falls by about one, and the log."""
    grid = torch.linspace(-1.0, 1.0, _GRID, dtype=start.dtype, device=start.device)[:, None]
    centre, reach, top = start.clone(), reach.clone(), torch.full_like(start, math.nan)
    width, rows = reach.clone(), torch.arange(len(start), device=start.device)
    for _ in range(_SEARCHES):
        points = centre[rows] + reach[rows] * grid  # (G, m)
        logs = log_product(points, rows)
        top[rows], index = logs.max(0)
        best = points.gather(0, index[None])[0]
        sides = torch.stack([index - 1, index + 1]).clamp(0, _GRID - 1)
        fall = top[rows] - logs.gather(0, sides).amin(0)
        outside = (index == 0) | (index == _GRID - 1)
        cell = 2.0 / (_GRID - 1) * reach[rows]
        centre[rows], width[rows] = best, cell
        reach[rows] = torch.where(outside, 2.0 * reach[rows], cell)
        more = (outside | ~(fall <= 1.0)) & torch.isfinite(top[rows])
        rows = rows[more]
        if not len(rows):
            break
    return centre, width, top


def _edges(centre: Tensor, width: Tensor, reach: Tensor) -> Tensor:
    """Return the edges (2 K + 1, n) of panels that widen by a constant factor from a peak to its reach."""
    power = torch.arange(_PANELS, dtype=centre.dtype, device=centre.device)[:, None] / (_PANELS - 1)
    away = width * (reach / width).clamp_min(1.0) ** power
    return torch.cat([(centre - away).flip(0), centre[None], centre + away])


def _integrals(log_product: LogFactor, edges: Tensor, centre: Tensor, width: Tensor, top: Tensor) -> Tensor:
    """Return the integrals (3, n) of u^k exp(log - top) over u = (a - centre) / width, for k = 0, 1, 2."""
    nodes, weights, last = (values.to(centre.device) for values in _rule())
    rows = torch.arange(edges.shape[1], device=centre.device).repeat(len(edges) - 1)
    low, high = edges[:-1].reshape(-1), edges[1:].reshape(-1)
    size = None
    total = torch.zeros(3, edges.shape[1], dtype=centre.dtype, device="cpu")  # the CPU adds in a fixed order
    for depth in range(_DEPTH):
        points = low + (high - low) * nodes[:, None]  # (K, m)
        away, length = (points - centre[rows]) / width[rows], (high - low) / width[rows]
        mass = (log_product(points, rows) - top[rows]).exp() * length
        squares = away.square() * mass
        sums = torch.stack([weights @ mass, weights @ (away * mass), weights @ squares])  # (3, m)
        if size is None:
            size = sums[::2].reshape(2, len(edges) - 1, -1).sum(1)  # of mass and squares
        rough = torch.stack([(last @ mass).abs().amax(0), (last @ squares).abs().amax(0)])
        settled = ~(rough > _TAIL * size[:, rows]).any(0)  # NaN is, too
        if depth == _DEPTH - 1 or len(rows) > _MOST * edges.shape[1]:
            settled = torch.ones_like(settled)
        total.index_add_(1, rows[settled].cpu(), sums[:, settled].cpu())
        if bool(settled.all()):
            break
        low, high, rows = low[~settled], high[~settled], rows[~settled]
        middle = 0.5 * (low + high)
        low, high, rows = torch.cat([low, middle]), torch.cat([middle, high]), torch.cat([rows, rows])
    return total.to(centre.device)


@cache
def _rule() -> tuple[Tensor, Tensor, Tensor]:
    """Return nodes and weights of the Gauss-Legendre rule on (0, 1), and rows that give its last two coefficients."""
    nodes, weights = np.polynomial.legendre.leggauss(_NODES)
    degrees = np.arange(_NODES - 2, _NODES)
    last = np.polynomial.legendre.legvander(nodes, _NODES - 1)[:, degrees] * weights[:, None] * (degrees + 0.5)
    return torch.from_numpy(0.5 * (nodes + 1.0)), torch.from_numpy(0.5 * weights), torch.from_numpy(last.T.copy())
