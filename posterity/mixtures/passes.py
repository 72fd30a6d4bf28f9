"""Passes over the rows of a mixture, chunk by chunk: the sums of an EM round, and what is asked about each row."""

from collections.abc import Iterator

import torch
from torch import Tensor

from posterity.mixtures.covariance import Covariance, Whitener
from posterity.mixtures.rows import Components, Rows, Statistics

# Bytes of a chunk's whitened rows. On a CPU they should stay in the cache of a core; on a GPU few large kernels win.
CPU_BYTES = 1 << 20
GPU_BYTES = 1 << 28


@torch.no_grad()
def statistics(rows: Rows, kind: Covariance, components: Components) -> Statistics:
    """The sums over all rows that an M-step and a bound need, in one pass.

    Takes the rows, the kind of covariance and R mixtures of it; gives `Statistics` about the means given.
    """
    restarts, count = components.offsets.shape
    total = torch.zeros(3, restarts, dtype=torch.float64, device=rows.points.device)
    counts = torch.zeros(restarts, count, dtype=torch.float64, device=rows.points.device)
    # A component of weight 0 has the score -inf; a finite one lets 0 log 0 be 0 below.
    lowest = torch.finfo(rows.points.dtype).min
    components = components._replace(offsets=components.offsets.clamp_min(lowest / 8))
    whitener = None
    for piece, whitener, scores in _chunks(rows, kind, components):
        if rows.labels is not None:
            scores.masked_fill_(_excluded(rows.labels[piece], count), lowest / 2)
        top = scores.amax(1)  # (R, n)
        scores -= top[:, None]
        shares = scores.exp()
        sums = shares.sum(1)
        logs = sums.log()
        if rows.weights is None:
            shares *= sums.reciprocal_()[:, None]
        else:
            weights = rows.weights[piece].to(scores.dtype)
            shares *= (weights / sums)[:, None]
            top *= weights
            logs *= weights
        counts += shares.sum(2)
        total[0] += top.sum(1)
        total[1] += logs.sum(1)
        total[2] += (scores * shares).sum((1, 2))
        whitener.add(shares.flatten(0, 1))
    if whitener is None:
        raise ValueError("A pass needs at least one row. Got none.")
    first, scatters = whitener.sums()
    shifts = torch.where(counts[..., None] > 0, first / counts[..., None], 0.0)
    return Statistics(counts, shifts, scatters, total[0] + total[1], total[1] - total[2])


@torch.no_grad()
def scores(rows: Rows, kind: Covariance, components: Components) -> Tensor:
    """The scores (R, N, K) of all rows, in the points' number type; labels and weights play no part."""
    restarts, count = components.offsets.shape
    found = rows.points.new_empty(restarts, len(rows.points), count)
    for piece, _, chunk in _chunks(rows, kind, components):
        found[:, piece] = chunk.mT
    return found


@torch.no_grad()
def responsibilities(rows: Rows, kind: Covariance, components: Components) -> Tensor:
    """The probabilities (R, N, K) of the components for each row; one-hot for a row with a label."""
    restarts, count = components.offsets.shape
    found = rows.points.new_empty(restarts, len(rows.points), count)
    for piece, _, chunk in _chunks(rows, kind, components):
        if rows.labels is not None:
            chunk.masked_fill_(_excluded(rows.labels[piece], count), -torch.inf)
        found[:, piece] = torch.softmax(chunk, 1).mT
    return found


@torch.no_grad()
def log_densities(rows: Rows, kind: Covariance, components: Components) -> Tensor:
    """log sum_k exp(score_nk) of each row (R, N), whatever its label."""
    found = rows.points.new_empty(len(components.offsets), len(rows.points))
    for piece, _, chunk in _chunks(rows, kind, components):
        found[:, piece] = torch.logsumexp(chunk, 1)
    return found


def _chunks(rows: Rows, kind: Covariance, components: Components) -> Iterator[tuple[slice, Whitener, Tensor]]:
    """Each piece of the rows, with the whitener of the pass and the scores (R, K, n)."""
    points = rows.points.detach()
    num_data, dimensions = points.shape
    restarts, count = components.offsets.shape
    size = min(num_data, chunk_rows(points, kind.row_numbers(restarts * count, dimensions)))
    if size == 0:
        return
    # The centre is subtracted as the points' number type has it; the means take what was rounded off.
    centre = rows.centre.to(points.dtype)
    means = components.means + (rows.centre - centre)
    whitener = kind.whitener(components._replace(means=means), points, size)
    offsets = components.offsets.to(points.dtype)[..., None]
    workspace = points.new_empty(dimensions * size)
    for start in range(0, num_data, size):
        piece = slice(start, min(start + size, num_data))
        length = piece.stop - start
        centred = workspace[: dimensions * length].view(dimensions, length)
        torch.sub(points[piece].mT, centre[:, None], out=centred)
        halves = whitener.half_squares(centred).view(restarts, count, length)
        yield piece, whitener, torch.sub(offsets, halves, out=halves)


def chunk_rows(points: Tensor, numbers: int) -> int:
    """How many rows a chunk has where each takes this many numbers."""
    budget = CPU_BYTES if points.device.type == "cpu" else GPU_BYTES
    return max(256, budget // (numbers * points.element_size()))


def _excluded(labels: Tensor, components: int) -> Tensor:
    """Which components (K, n) the labels rule out."""
    each = torch.arange(components, device=labels.device)[:, None]
    return (labels >= 0) & (labels != each)
