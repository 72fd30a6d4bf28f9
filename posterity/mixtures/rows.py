"""What goes into a pass over the rows of a mixture, and what comes out."""

import math
from typing import Final, NamedTuple

import torch
from torch import Tensor

WORK: Final = torch.float64  # the number type of all that a pass computes; float32 rows are cast chunk by chunk

# Bytes that a pass works on at a time. On a CPU they should stay in the caches; on a GPU few large kernels win.
CPU_BYTES = 1 << 21
GPU_BYTES = 1 << 28


class Rows(NamedTuple):
    """Points with their weights and known components; `centre` is what the means of components are relative to.

    Takes points (N, D) in float32 or float64, which are never copied whole; weights (N,) or None for ones; labels (N,)
    of whole numbers, -1 where the component is unknown, or None; centre (D,) in float64. `rows_of` chooses a centre.
    """

    points: Tensor  # (N, D)
    weights: Tensor | None  # (N,)
    labels: Tensor | None  # (N,)
    centre: Tensor  # (D,)


class Components(NamedTuple):
    """R mixtures of K components: score_nk = offset_k - 1/2 |(x_n - mean_k) A_k|^2, in float64.

    For a Gaussian mixture the offset is log weight - D/2 log 2 pi + log det A.
    """

    offsets: Tensor  # (R, K)
    means: Tensor  # (R, K, D), relative to the rows' centre
    factors: Tensor  # (R, *shape), A in the storage of the kind of covariance


class Statistics(NamedTuple):
    """Sums over all rows under the responsibilities r, in float64, about the means that the pass was given."""

    counts: Tensor  # (R, K) sum_n w_n r_nk
    shifts: Tensor  # (R, K, D) sum_n w_n r_nk (x_n - mean_k) / counts_k, 0 where counts_k is 0
    scatters: Tensor  # (R, *shape) sum_n w_n r_nk (x_n - mean_k)(x_n - mean_k)^T, in the storage of the kind
    log_likelihood: Tensor  # (R,) sum_n w_n log sum_k exp(score_nk); of a labelled row w_n score_{n, label}
    entropy: Tensor  # (R,) -sum_n w_n sum_k r_nk log r_nk


def rows_of(points: Tensor, weights: Tensor | None = None, labels: Tensor | None = None) -> Rows:
    """The rows, centred at the mean of the points: takes points (N, D), weights (N,) and labels (N,)."""
    return Rows(points, weights, labels, points.detach().mean(0).to(torch.float64))


def chunk_rows(numbers: int, offsets: Tensor, num_data: int) -> int:
    """How many rows to take at a time, where each needs this many numbers and the softmax of its scores.

    Takes the components' offsets (R, K).
    """
    restarts, components = offsets.shape
    numbers += restarts * (2 * components + 3)  # scores, shares; three sums over components
    budget = CPU_BYTES if offsets.device.type == "cpu" else GPU_BYTES
    return max(1, min(num_data, max(64, budget // (numbers * WORK.itemsize))))


def taken(workspace: Tensor, *shape: int) -> Tensor:
    """A tensor of this shape at the beginning of a workspace (W,)."""
    return workspace[: math.prod(shape)].view(shape)
