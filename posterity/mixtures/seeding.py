"""Starts of the restarts of a mixture: k-means++, k-means, random rows, random responsibilities."""

import math

import torch
from torch import Tensor

from posterity.mixtures.covariance import Covariance, Spherical
from posterity.mixtures.passes import excluded, score_pieces, statistics
from posterity.mixtures.sweeps import Components, Rows, Statistics
from posterity.numerics.random import Key

INITS = ("kmeans", "k-means++", "random", "random_from_data")
SUBSET = 1 << 15  # the largest number of rows from which seeds are chosen
LLOYD = 30  # the largest number of rounds of k-means
SETTLED = 1e-3  # k-means ends when no centre moves by more than this share of the spread of the rows
SHARPNESS = 1e4  # the distance of seeds over their width at which assignments of rows to seeds are sharp
SAME = 1e-12  # the share of the spread of the rows within which two seeds coincide


def seeds(rows: Rows, components: int, restarts: int, init: str, key: Key) -> Tensor:
    """Centres (R, K, D) relative to `rows.centre` by "kmeans", "k-means++" or "random_from_data".

    Of more than 32768 rows a random subset of that size is used. A component with labelled rows begins at their mean;
    row weights count as copies of the row.
    """
    few = _subset(rows, key.fold("subset"))
    assert isinstance(few.points, Tensor)
    known, centres = _labelled(rows, components)  # (K,), (K, D)
    points = few.points.to(torch.float64) - few.centre  # (n, D)
    weights = torch.ones_like(points[:, 0]) if few.weights is None else few.weights
    if init == "random_from_data":  # K different rows by weight: the first arrivals of clocks at rates of the weights
        uniform = key.fold("rows").uniform((restarts, len(points)), torch.float64, points.device)
        drawn = points[(-torch.log1p(-uniform) / weights).topk(components, largest=False).indices]
        return torch.where(known[:, None], centres, drawn)
    centres = _plus_plus(points, weights, known, centres.expand(restarts, -1, -1).clone(), key.fold("rows"))
    if init != "kmeans":
        return centres
    spread = spread_of(few)
    for _ in range(LLOYD):
        shifts = nearest(few, Spherical(), centres, spread).shifts
        centres = centres + shifts
        if not float(shifts.abs().max()) > SETTLED * spread:
            break
    return centres


def nearest(rows: Rows, kind: Covariance, centres: Tensor, spread: float) -> Statistics:
    """Sums over all rows, each assigned to the nearest of the centres (R, K, D), or to its label; ties are shared.

    Seeds much closer than `spread`, the spread of all rows, coincide.
    """
    return statistics(rows, kind, _sharp(kind, centres, spread))


def shared_at_random(rows: Rows, kind: Covariance, components: int, restarts: int, key: Key) -> Statistics:
    """Sums over all rows under random responsibilities, uniform numbers over their sum, about `rows.centre`."""
    centre = torch.zeros(restarts, components, rows.points.shape[1], dtype=torch.float64, device=rows.points.device)
    sweep = kind.sweep(_sharp(kind, centre, SHARPNESS), len(rows.points))
    counts = torch.zeros_like(centre[..., 0])
    for piece, labels, weights, chunk in score_pieces(rows, sweep, Components(counts, centre, centre)):
        shares = key.fold(piece.start).uniform(tuple(chunk.shape), torch.float64, centre.device)
        if labels is not None:
            shares = torch.where(labels >= 0, (~excluded(labels, components)).to(shares.dtype), shares)
        shares /= shares.sum(1, keepdim=True)
        if weights is not None:
            shares *= weights
        counts += shares.sum(2)
        sweep.add(shares.flatten(0, 1))
    first, scatters = sweep.sums(counts)
    shifts = torch.where(counts[..., None] > 0, first / counts[..., None], 0.0)
    return Statistics(counts, shifts, kind.stored(scatters), counts.new_zeros(restarts), counts.new_zeros(restarts))


def _subset(rows: Rows, key: Key) -> Rows:
    """The rows in memory, or `SUBSET` of them drawn with replacement where there are more."""
    count = len(rows.points)
    if count <= SUBSET and isinstance(rows.points, Tensor):
        return rows
    if count <= SUBSET:
        return rows._replace(points=rows.points[torch.arange(count, device=rows.points.device)])
    if rows.weights is None:
        chosen = (key.uniform((SUBSET,), torch.float64, rows.points.device) * count).long()
    else:
        chosen = _drawn(rows.weights[None], SUBSET, key)[0]
    labels = None if rows.labels is None else rows.labels[chosen]
    return Rows(rows.points[chosen], None, labels, rows.centre)


def _labelled(rows: Rows, components: int) -> tuple[Tensor, Tensor]:
    """A mask of the components with labelled rows (K,), and the means of these (K, D) relative to the centre."""
    dimensions, device = rows.points.shape[1], rows.points.device
    zeros = torch.zeros(1, components, dimensions, dtype=torch.float64, device=device)
    if rows.labels is None:
        return torch.zeros(components, dtype=torch.bool, device=device), zeros[0]
    told = (rows.labels >= 0).to(torch.float64)
    rows = rows._replace(weights=told if rows.weights is None else told * rows.weights)
    sums = nearest(rows, Spherical(), zeros, 1.0)
    return sums.counts[0] > 0, sums.shifts[0]


def _plus_plus(points: Tensor, weights: Tensor, known: Tensor, centres: Tensor, key: Key) -> Tensor:
    """Greedy k-means++: draw a few rows by squared distance from the seeds, take the best for the remaining sum."""
    restarts, components, _ = centres.shape
    trials = 2 + int(math.log(components))
    nearest_square = points.new_full((restarts, len(points)), torch.inf)
    for index in known.nonzero().flatten().tolist():
        nearest_square = torch.minimum(nearest_square, _squares(points, centres[:, index, None])[:, 0])
    for index in (~known).nonzero().flatten().tolist():
        chances = torch.where(torch.isinf(nearest_square), 1.0, nearest_square) * weights
        chances = torch.where(chances.sum(-1, keepdim=True) > 0, chances, weights)  # all rows lie on seeds
        drawn = _drawn(chances, trials, key.fold(index))  # (R, trials)
        left = torch.minimum(nearest_square[:, None], _squares(points, points[drawn]))  # (R, trials, n)
        best = (left * weights).sum(-1).argmin(-1)
        each = torch.arange(restarts, device=best.device)
        centres[:, index], nearest_square = points[drawn[each, best]], left[each, best]
    return centres


def _sharp(kind: Covariance, centres: Tensor, spread: float) -> Components:
    """Components at the centres, so narrow that a row belongs to the nearest alone.

    The closest two centres set the width: with a single distant row, the spread of all may be wider than clusters.
    """
    restarts, components, dimensions = centres.shape
    apart = torch.cdist(centres, centres, compute_mode="donot_use_mm_for_euclid_dist")  # (R, K, K)
    closest = torch.where(apart > SAME * spread, apart, spread).flatten(1).amin(1).clamp_max(spread)
    shape = kind.shape(components, dimensions)
    factors = kind.identity(dimensions, centres) * (SHARPNESS / closest).view(restarts, *(1,) * len(shape))
    return Components(centres.new_zeros(restarts, components), centres, factors.expand(restarts, *shape).contiguous())


def statistics_of_all(rows: Rows, kind: Covariance) -> Statistics:
    """Sums over all rows about their centre, as a single component, whatever their labels."""
    dimensions = rows.points.shape[1]
    zeros = torch.zeros(1, 1, dimensions, dtype=torch.float64, device=rows.points.device)
    unit = kind.identity(dimensions, zeros).expand(1, *kind.shape(1, dimensions)).contiguous()
    return statistics(rows._replace(labels=None), kind, Components(zeros[..., 0], zeros, unit))


def spread_of(rows: Rows) -> float:
    """The root mean square distance of the rows from their centre, by weight; 1 where all rows are equal."""
    sums = statistics_of_all(rows, Spherical())
    return float((sums.scatters / sums.counts).sqrt()) or 1.0


def _squares(points: Tensor, centres: Tensor) -> Tensor:
    """Squared distances (R, T, n) of points (n, D) from centres (R, T, D), one dimension after another."""
    total = points.new_zeros(*centres.shape[:2], len(points))
    for dimension in range(points.shape[1]):
        total += (points[:, dimension] - centres[..., dimension, None]).square_()
    return total


def _drawn(chances: Tensor, count: int, key: Key) -> Tensor:
    """Draw indices (R, count) with chances (R, n), which need not sum to 1."""
    sums = chances.cumsum(-1)
    numbers = key.uniform((len(chances), count), torch.float64, chances.device) * sums[:, -1:]
    return torch.searchsorted(sums, numbers, right=True).clamp_max(chances.shape[-1] - 1)
