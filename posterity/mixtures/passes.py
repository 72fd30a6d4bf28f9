"""Passes over the rows of a mixture, chunk by chunk: the sums of an EM round, and scores of each row."""

from collections.abc import Iterator

import torch
from torch import Tensor

from posterity.mixtures.covariance import Covariance
from posterity.mixtures.sweeps import WORK, Components, Rows, Statistics, Sweep, taken
from posterity.processes import active


@torch.no_grad()
def statistics(rows: Rows, kind: Covariance, components: Components) -> Statistics:
    """Sum over all rows in one pass, for an M-step and a bound, under R mixtures and about their means.

    Active processes share rows in memory; each reads all of those in files.
    """
    processes, points = active(), rows.points
    if processes is None or not isinstance(points, Tensor):
        sums = _sums(rows, kind, components)
    else:

        def part(low: int, high: int) -> tuple[Tensor, ...]:
            weights, labels = (None if each is None else each[low:high] for each in (rows.weights, rows.labels))
            return _sums(Rows(points[low:high], weights, labels, rows.centre), kind, components)

        sums = tuple(processes.total(part, len(points)))
    counts, first, scatters, log_likelihood, entropy = sums
    shifts = first / counts[..., None].clamp_min(torch.finfo(WORK).tiny)
    return Statistics(counts, shifts, kind.stored(scatters), log_likelihood, entropy)


@torch.no_grad()
def _sums(rows: Rows, kind: Covariance, components: Components) -> tuple[Tensor, ...]:
    """Counts, sums of x - mean and its products with itself, log-likelihood and entropy of these rows."""
    restarts, count = components.offsets.shape
    counts = torch.zeros_like(components.offsets)
    tops, logs, negentropies = counts.new_zeros(3, restarts)
    # A component of weight 0 has the score -inf; a finite one lets 0 log 0 be 0 below.
    lowest = torch.finfo(WORK).min
    components = components._replace(offsets=components.offsets.clamp_min(lowest / 8))
    sweep = kind.sweep(components, len(rows.points))
    share_space, sum_space = counts.new_empty(counts.numel() * sweep.rows), counts.new_empty(2 * restarts * sweep.rows)
    for _, labels, own, scores in score_pieces(rows, sweep, components):
        shares = taken(share_space, *scores.shape)
        top, total = taken(sum_space, 2, restarts, scores.shape[2])
        if labels is not None:
            scores.masked_fill_(excluded(labels, count), lowest / 2)
        torch.amax(scores, 1, out=top)
        scores -= top[:, None]
        torch.exp(scores, out=shares)
        torch.sum(shares, 1, out=total)
        weights = None if own is None else own.to(WORK)
        shares *= (total.reciprocal() if weights is None else weights / total)[:, None]
        total.log_()
        if weights is not None:
            top *= weights
            total *= weights
        counts += shares.sum(2)
        tops += top.sum(1)
        logs += total.sum(1)
        negentropies += scores.mul_(shares).sum((1, 2))
        sweep.add(shares.flatten(0, 1))
    return counts, *sweep.sums(counts), tops + logs, logs - negentropies


@torch.no_grad()
def scores(rows: Rows, kind: Covariance, components: Components) -> Tensor:
    """The scores (R, N, K) of all rows, without labels and weights.

    They are float64: for a row far from all components float32 would lose their differences.
    """
    restarts, count = components.offsets.shape
    result = components.offsets.new_empty(restarts, len(rows.points), count)
    for piece, chunk in score_chunks(rows, kind, components):
        result[:, piece] = chunk.mT
    return result


@torch.no_grad()
def responsibilities(rows: Rows, kind: Covariance, components: Components) -> Tensor:
    """The probabilities (R, N, K) of the components for each row; one-hot for a row with a label."""
    restarts, count = components.offsets.shape
    result = components.offsets.new_empty(restarts, len(rows.points), count, dtype=rows.points.dtype)
    for piece, labels, _, chunk in score_pieces(rows, kind.sweep(components, len(rows.points)), components):
        if labels is not None:
            chunk.masked_fill_(excluded(labels, count), -torch.inf)
        result[:, piece] = torch.softmax(chunk, 1).mT
    return result


@torch.no_grad()
def log_densities(rows: Rows, kind: Covariance, components: Components) -> Tensor:
    """log sum_k exp(score_nk) of each row (R, N), whatever its label."""
    result = components.offsets.new_empty(len(components.offsets), len(rows.points), dtype=rows.points.dtype)
    for piece, chunk in score_chunks(rows, kind, components):
        result[:, piece] = torch.logsumexp(chunk, 1)
    return result


@torch.no_grad()
def score_chunks(rows: Rows, kind: Covariance, components: Components) -> Iterator[tuple[slice, Tensor]]:
    """Yield slices of the rows with their scores (R, K, n) in float64, which the next slice overwrites."""
    for piece, _, _, chunk in score_pieces(rows, kind.sweep(components, len(rows.points)), components):
        yield piece, chunk


@torch.no_grad()
def score_pieces(
    rows: Rows, sweep: Sweep, components: Components
) -> Iterator[tuple[slice, Tensor | None, Tensor | None, Tensor]]:
    """Yield slices of the rows with their labels, weights and scores (R, K, n), which the next slice overwrites.

    The sweep holds the points of the slice, whose moments it adds.
    """
    for start, points, weights, labels in rows.pieces(sweep.rows):
        chunk = sweep.scores(points, rows.centre).view(*components.offsets.shape, -1)
        yield slice(start, start + len(points)), labels, weights, chunk


def excluded(labels: Tensor, components: int) -> Tensor:
    """A mask of the components (K, n) that the labels rule out."""
    each = torch.arange(components, device=labels.device)[:, None]
    return (labels >= 0) & (labels != each)
