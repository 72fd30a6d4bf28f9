"""Where the restarts of a mixture begin: k-means++, k-means, rows at random, random responsibilities."""

import math

import torch
from torch import Tensor

from posterity.mixtures.covariance import Covariance, Spherical
from posterity.mixtures.passes import excluded, statistics
from posterity.mixtures.sweeps import Components, Rows, Statistics
from posterity.numerics.random import Key

INITS = ("kmeans", "k-means++", "random", "random_from_data")
SUBSET = 1 << 15  # rows among which seeds are looked for
LLOYD = 30  # rounds of k-means at most
SETTLED = 1e-3  # the share of the spread of the rows that no centre may move by in the last of them
SHARPNESS = 1e4  # the distance of seeds over the width at which assignments of rows to seeds are sharp
SAME = 1e-12  # the share of the spread of the rows within which two seeds are one


def seeds(rows: Rows, components: int, restarts: int, init: str, key: Key) -> Tensor:
    """Centres (R, K, D) relative to `rows.centre` by "kmeans", "k-means++" or "random_from_data".

    They are looked for among 32768 rows chosen at random where there are more. A component with labelled rows begins at
    their mean; row weights count as copies of the row.
    """
    few = _subset(rows, key.fold("subset"))
    known, centres = _labelled(rows, components)  # (K,), (K, D)
    points = few.points.to(torch.float64) - few.centre  # (n, D)
    weights = torch.ones_like(points[:, 0]) if few.weights is None else few.weights
    if init == "random_from_data":
        drawn = _any_rows(points, weights, components, restarts, key.fold("rows"))
        return torch.where(known[:, None], centres, drawn)
    centres = _plus_plus(points, weights, known, centres.expand(restarts, -1, -1).clone(), key.fold("rows"))
    return _lloyd(few, centres) if init == "kmeans" else centres


def nearest(rows: Rows, kind: Covariance, centres: Tensor, spread: float) -> Statistics:
    """Sums over all rows when each belongs to the nearest of the centres (R, K, D), or to its label; ties are shared.

    `spread` is that of all rows: seeds much closer than that are one.
    """
    return statistics(rows, kind, _sharp(kind, centres, spread))


def shared_at_random(rows: Rows, kind: Covariance, components: int, restarts: int, key: Key) -> Statistics:
    """Sums over all rows under random responsibilities, uniform numbers over their sum, about `rows.centre`."""
    centre = torch.zeros(restarts, components, rows.points.shape[1], dtype=torch.float64, device=rows.points.device)
    sweep = kind.sweep(_sharp(kind, centre, SHARPNESS), len(rows.points))
    counts = torch.zeros_like(centre[..., 0])
    for begin in range(0, len(rows.points), sweep.rows):
        piece = slice(begin, begin + sweep.rows)
        sweep.scores(rows.points[piece], rows.centre)  # it notes the rows whose moments it adds
        shape = (restarts, components, len(rows.points[piece]))
        shares = key.fold(begin).uniform(shape, torch.float64, centre.device)
        if rows.labels is not None:
            labels = rows.labels[piece]
            shares = torch.where(labels >= 0, (~excluded(labels, components)).to(shares.dtype), shares)
        shares /= shares.sum(1, keepdim=True)
        if rows.weights is not None:
            shares *= rows.weights[piece]
        counts += shares.sum(2)
        sweep.add(shares.flatten(0, 1))
    first, scatters = sweep.sums(counts)
    shifts = torch.where(counts[..., None] > 0, first / counts[..., None], 0.0)
    return Statistics(counts, shifts, kind.stored(scatters), counts.new_zeros(restarts), counts.new_zeros(restarts))


def _subset(rows: Rows, key: Key) -> Rows:
    """The rows, or some of them drawn with replacement where there are many."""
    count = len(rows.points)
    if count <= SUBSET:
        return rows
    weights = rows.weights
    if weights is None:
        chosen = (key.uniform((SUBSET,), torch.float64, rows.points.device) * count).long()
    else:
        chosen = _drawn(weights[None].expand(1, -1), SUBSET, key)[0]
    labels = None if rows.labels is None else rows.labels[chosen]
    return Rows(rows.points[chosen], None, labels, rows.centre)


def _labelled(rows: Rows, components: int) -> tuple[Tensor, Tensor]:
    """Which components have labelled rows (K,), and the means of those (K, D) relative to the centre."""
    dimensions, device = rows.points.shape[1], rows.points.device
    zeros = torch.zeros(1, components, dimensions, dtype=torch.float64, device=device)
    if rows.labels is None:
        return torch.zeros(components, dtype=torch.bool, device=device), zeros[0]
    told = (rows.labels >= 0).to(torch.float64)
    rows = rows._replace(weights=told if rows.weights is None else told * rows.weights)
    sums = nearest(rows, Spherical(), zeros, 1.0)
    return sums.counts[0] > 0, sums.shifts[0]


def _plus_plus(points: Tensor, weights: Tensor, known: Tensor, centres: Tensor, key: Key) -> Tensor:
    """Greedy k-means++: of a few rows drawn by squared distance from the seeds so far, the one that leaves least."""
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


def _any_rows(points: Tensor, weights: Tensor, components: int, restarts: int, key: Key) -> Tensor:
    """K different rows for each restart, by weight: the first arrivals of clocks that run at the weights."""
    clocks = -torch.log1p(-key.uniform((restarts, len(points)), torch.float64, points.device)) / weights
    return points[clocks.topk(components, largest=False).indices]


def _lloyd(rows: Rows, centres: Tensor) -> Tensor:
    spread = spread_of(rows)
    for _ in range(LLOYD):
        shifts = nearest(rows, Spherical(), centres, spread).shifts
        centres = centres + shifts
        if not float(shifts.abs().max()) > SETTLED * spread:
            break
    return centres


def _sharp(kind: Covariance, centres: Tensor, spread: float) -> Components:
    """Components at the centres, so narrow that a row belongs to the nearest alone.

    The width follows from the closest two centres: beside one far row, the spread of all may be wider than clusters.
    """
    restarts, components, dimensions = centres.shape
    apart = torch.cdist(centres, centres, compute_mode="donot_use_mm_for_euclid_dist")  # (R, K, K)
    closest = torch.where(apart > SAME * spread, apart, spread).flatten(1).amin(1).clamp_max(spread)
    shape = kind.shape(components, dimensions)
    factors = kind.identity(dimensions, centres) * (SHARPNESS / closest).view(restarts, *(1,) * len(shape))
    return Components(centres.new_zeros(restarts, components), centres, factors.expand(restarts, *shape).contiguous())


def statistics_of_all(rows: Rows, kind: Covariance) -> Statistics:
    """Sums over all rows about their centre, as of one component, whatever their labels."""
    dimensions = rows.points.shape[1]
    zeros = torch.zeros(1, 1, dimensions, dtype=torch.float64, device=rows.points.device)
    unit = kind.identity(dimensions, zeros).expand(1, *kind.shape(1, dimensions)).contiguous()
    return statistics(rows._replace(labels=None), kind, Components(zeros[..., 0], zeros, unit))


def spread_of(rows: Rows) -> float:
    """The root mean square distance of the rows from their centre, by weight; 1 where they all lie there."""
    sums = statistics_of_all(rows, Spherical())
    return float((sums.scatters / sums.counts).sqrt()) or 1.0


def _squares(points: Tensor, centres: Tensor) -> Tensor:
    """Squared distances (R, T, n) of points (n, D) from centres (R, T, D), one dimension after another."""
    total = points.new_zeros(*centres.shape[:2], len(points))
    for dimension in range(points.shape[1]):
        total += (points[:, dimension] - centres[..., dimension, None]).square_()
    return total


def _drawn(chances: Tensor, count: int, key: Key) -> Tensor:
    """Places (R, count) drawn with chances (R, n), which need not sum to 1."""
    sums = chances.cumsum(-1)
    numbers = key.uniform((len(chances), count), torch.float64, chances.device) * sums[:, -1:]
    return torch.searchsorted(sums, numbers, right=True).clamp_max(chances.shape[-1] - 1)
