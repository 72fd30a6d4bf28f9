"""Rows, components and sums of a pass over the rows of a mixture, and the work on one chunk of rows."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Final, NamedTuple

import torch
from torch import Tensor

from posterity.datasets.shards import Shards

WORK: Final = torch.float64  # the dtype of all that a pass computes; float32 rows are cast chunk by chunk

# Bytes that a pass works on at a time. On a CPU they should stay in the caches; on a GPU few large kernels win.
CPU_BYTES = 1 << 21
GPU_BYTES = 1 << 28


class StoredPoints:
    """Points (N, D) in files, which are read block by block in each pass over them."""

    device = torch.device("cpu")

    def __init__(self, shards: Shards) -> None:
        self.shards, self.dtype, self.shape = shards, shards.dtype, (len(shards), *shards.row_shape)

    def __len__(self) -> int:
        """Number of points N."""
        return len(self.shards)

    def __getitem__(self, rows: Tensor) -> Tensor:
        """The points at these row numbers (n,), by a pass over the files."""
        return self.shards.take(rows)


class Rows(NamedTuple):
    """Points with their weights and known components; means of components are relative to `centre`.

    Takes points (N, D) in float32 or float64, which are never copied whole; weights (N,) or None for ones; labels (N,)
    of whole numbers, -1 where the component is unknown, or None; centre (D,) in float64. `rows_of` chooses a centre.
    """

    points: Tensor | StoredPoints  # (N, D)
    weights: Tensor | None  # (N,)
    labels: Tensor | None  # (N,)
    centre: Tensor  # (D,)

    def pieces(self, size: int | None = None) -> Iterator[tuple[int, Tensor, Tensor | None, Tensor | None]]:
        """Yield points in memory of at most `size` rows with the number of rows before them, weights and labels."""
        blocks = self.points.shards.blocks() if isinstance(self.points, StoredPoints) else [(0, self.points.detach())]
        for first, block, *_ in blocks:
            for low in range(0, len(block), size or max(1, len(block))):
                points = block[low : low + size] if size else block
                piece = slice(first + low, first + low + len(points))
                weights, labels = (None if each is None else each[piece] for each in (self.weights, self.labels))
                yield piece.start, points, weights, labels


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
    """Make rows of points (N, D), weights (N,) and labels (N,), centred at the mean of the points."""
    return Rows(points, weights, labels, points.detach().mean(0).to(torch.float64))


def chunk_rows(numbers: int, offsets: Tensor, num_data: int) -> int:
    """The number of rows in a chunk, where each needs `numbers` and the softmax of its scores; offsets are (R, K)."""
    restarts, components = offsets.shape
    numbers += restarts * (2 * components + 3)  # scores, shares; three sums over components
    budget = CPU_BYTES if offsets.device.type == "cpu" else GPU_BYTES
    return max(1, min(num_data, max(64, budget // (numbers * WORK.itemsize))))


def taken(workspace: Tensor, *shape: int) -> Tensor:
    """A tensor of this shape at the beginning of a workspace (W,)."""
    return workspace[: math.prod(shape)].view(shape)


class Sweep(ABC):
    """Scores and moments of one chunk of rows after another, for M = R K components, in float64."""

    rows: int  # the largest number of rows in a chunk

    @abstractmethod
    def scores(self, points: Tensor, centre: Tensor) -> Tensor:
        """The scores (M, n) of points (n, D) less the centre (D,); the caller may write over them."""

    @abstractmethod
    def add(self, weights: Tensor) -> None:
        """Add the moments of the points last given, with these weights (M, n)."""

    @abstractmethod
    def sums(self, counts: Tensor) -> tuple[Tensor, Tensor]:
        """The sums, from the sums of the weights (R, K): sum w (x - mean) (R, K, D), and sum w (x - mean)(x - mean)^T
        (R, K, D, D) or its diagonal (R, K, D).
        """


class _Whitened(Sweep):
    """Whitened coordinates of every component, with rows as the last axis: sums run along contiguous memory."""

    first: Tensor  # sums of the whitened coordinates (M, D)

    def __init__(self, components: Components, num_data: int) -> None:
        offsets, means, self.factors = components
        self.shape = means.shape
        count, dimensions = offsets.numel(), means.shape[2]
        self.offsets = offsets.reshape(count, 1)
        self.rows = chunk_rows((2 * count + 1) * dimensions, offsets, num_data)
        self.workspace = means.new_empty(2 * count * dimensions * self.rows)
        self.centred = means.new_empty(dimensions * self.rows)
        self.first = means.new_zeros(count, dimensions)


class ScaleSweep(_Whitened):
    """Distances over scales, their squares, and the weighted sums of both; factors are (R, K, D)."""

    def __init__(self, components: Components, num_data: int) -> None:
        super().__init__(components, num_data)
        self.means, self.scales = (tensor.reshape(*self.first.shape, 1) for tensor in components[1:])
        self.second = torch.zeros_like(self.first)

    def scores(self, points: Tensor, centre: Tensor) -> Tensor:
        self.z, self.squares = taken(self.workspace, 2, *self.first.shape, len(points))
        torch.sub(centred(points, centre, self.centred), self.means, out=self.z)
        self.z *= self.scales
        torch.mul(self.z, self.z, out=self.squares)
        return torch.add(self.offsets, self.squares.sum(1), alpha=-0.5)

    def add(self, weights: Tensor) -> None:
        self.z *= weights[:, None]
        self.first += self.z.sum(2)
        self.squares *= weights[:, None]
        self.second += self.squares.sum(2)

    def sums(self, counts: Tensor) -> tuple[Tensor, Tensor]:
        return self.first.view(self.shape) / self.factors, self.second.view(self.shape) / self.factors.square()


class MatrixSweep(_Whitened):
    """Whitened coordinates by one product (M D, D) (D, n), and moments in them; factors are (R, K, D, D)."""

    def __init__(self, components: Components, num_data: int) -> None:
        super().__init__(components, num_data)
        self.whitening = self.factors.mT.reshape(-1, self.shape[2])
        self.bias = -(components.means[..., None, :] @ self.factors).reshape(-1, 1)
        self.second = self.first.new_zeros(*self.first.shape, self.shape[2])

    def scores(self, points: Tensor, centre: Tensor) -> Tensor:
        self.z, self.scaled = taken(self.workspace, 2, *self.first.shape, len(points))
        rows = centred(points, centre, self.centred)
        torch.addmm(self.bias, self.whitening, rows, out=self.z.view(len(self.bias), -1))
        torch.mul(self.z, self.z, out=self.scaled)
        return torch.add(self.offsets, self.scaled.sum(1), alpha=-0.5)

    def add(self, weights: Tensor) -> None:
        torch.mul(self.z, weights[:, None], out=self.scaled)
        self.first += self.scaled.sum(2)
        self.second.baddbmm_(self.scaled, self.z.mT)

    def sums(self, counts: Tensor) -> tuple[Tensor, Tensor]:
        first = unwhitened(self.first.view(*self.shape[:2], 1, -1), self.factors)[..., 0, :]
        second = unwhitened(unwhitened(self.second.view(*self.shape, -1), self.factors).mT, self.factors)
        return first, (second + second.mT) / 2


def unwhitened(whitened: Tensor, factors: Tensor) -> Tensor:
    """Rows x (..., n, D) of the whitened coordinates z = x A."""
    rows: Tensor = torch.linalg.solve_triangular(factors, whitened, upper=True, left=False)
    return rows


def centred(points: Tensor, centre: Tensor, workspace: Tensor) -> Tensor:
    """Points (n, D) less the centre, transposed to (D, n), at the beginning of the workspace (W,)."""
    return torch.sub(points.mT, centre[:, None], out=taken(workspace, points.shape[1], len(points)))


# The tolerated rounding error of products: of a score, and of a covariance relative to itself.
TOLERATED = 1e-11


def suffice(sizes: Tensor) -> bool:
    """Whether products of coordinates are accurate enough, from the sums (R, K) of the sizes of their terms.

    These are sum_ij |P_ij| s_i s_j with the precision P of a component and s_i^2 = E x_i^2 about the centre: large for
    a component many standard deviations from the centre (1e-11 allows about 200), and for strong correlations.
    """
    return bool(sizes.amax() * torch.finfo(WORK).eps <= TOLERATED)


class MomentSweep(Sweep):
    """Two products a chunk: coefficients times features are scores, weights times features are sums.

    The features are x_i x_{i + s}, with indices modulo D, and x_i. A precision matrix needs the shifts s = 0 .. D // 2,
    a diagonal one s = 0 alone. One multiplication of the rows with a sliding view of themselves makes all products.
    Takes `pulls`, precision times mean (R, K, D), precisions by shift (R, K, S, D), and `restore`, which turns entries
    by shift into the scatters of the kind.
    """

    def __init__(
        self, components: Components, pulls: Tensor, precisions: Tensor, restore: Callable[..., Tensor], num_data: int
    ) -> None:
        restarts, count, shifts, dimensions = precisions.shape
        offsets, means, _ = components
        self.means, self.restore = means, restore
        numbers = (shifts + 1) * dimensions + shifts - 1
        self.rows = chunk_rows(numbers, offsets, num_data)
        self.shape = (restarts, count, shifts + 1, dimensions)
        # The score has half of P_ii x_i^2, and for even D the last shift has each pair of coordinates twice.
        shares = torch.ones(shifts, 1, dtype=WORK, device=means.device)
        shares[0] = 0.5
        if shifts > 1 and dimensions % 2 == 0:
            shares[-1] = 0.5
        coefficients = torch.cat([-shares * precisions, pulls[:, :, None]], 2)
        self.coefficients = coefficients.view(restarts * count, (shifts + 1) * dimensions)
        self.offsets = (offsets - 0.5 * (means * pulls).sum(-1)).view(-1, 1)
        self.workspace = means.new_empty(numbers * self.rows)
        self.results = means.new_empty(restarts * count * self.rows)
        self.totals = torch.zeros_like(self.coefficients)
        self._resize(self.rows)

    def scores(self, points: Tensor, centre: Tensor) -> Tensor:
        if len(points) != self.current.shape[1]:
            self._resize(len(points))
        torch.sub(points.mT, centre[:, None], out=self.centred)
        self.again.copy_(self.centred[: len(self.again)])
        torch.mul(self.around, self.centred, out=self.products)
        return torch.addmm(self.offsets, self.coefficients, self.features, out=self.current)

    def _resize(self, size: int) -> None:
        """Make views of the workspace for chunks of this size: products, rows, and the first rows again."""
        _, _, blocks, dimensions = self.shape
        shifts, used = blocks - 1, blocks * dimensions
        table = taken(self.workspace, used + shifts - 1, size)
        self.features, self.again = table[:used], table[used:]
        self.products = table[: shifts * dimensions].view(shifts, dimensions, size)
        self.centred = table[shifts * dimensions : used]
        self.around = table[shifts * dimensions :].unfold(0, dimensions, 1).mT  # (S, D, n)
        self.current = taken(self.results, len(self.offsets), size)

    def add(self, weights: Tensor) -> None:
        self.totals.addmm_(weights, self.features.mT)

    def sums(self, counts: Tensor) -> tuple[Tensor, Tensor]:
        totals = self.totals.view(self.shape)
        first, second = totals[:, :, -1], totals[:, :, :-1]
        away = first - counts[..., None] * self.means
        # (x - m)_i (x - m)_j = x_i x_j - m_i x_j - (x_i - m_i) m_j
        shifts = second.shape[2]
        return away, self.restore(second - by_shift(self.means, first, shifts) - by_shift(away, self.means, shifts))


def by_shift(left: Tensor, right: Tensor, shifts: int) -> Tensor:
    """left_i right_{i + s} (..., S, D) of two vectors (..., D)."""
    around = torch.cat([right, right[..., : shifts - 1]], -1)
    return left[..., None, :] * around.unfold(-1, left.shape[-1], 1)


def shifted(matrices: Tensor) -> Tensor:
    """Entries (i, i + s), indices modulo D, of symmetric matrices (..., D, D) by shift s: (..., D // 2 + 1, D)."""
    dimensions = matrices.shape[-1]
    entries = matrices.flatten(-2).index_select(-1, _indices(dimensions, matrices.device)[0])
    return entries.view(*matrices.shape[:-2], -1, dimensions)


def unshifted(entries: Tensor) -> Tensor:
    """Symmetric matrices (..., D, D) from their entries by shift, the inverse of `shifted`."""
    dimensions = entries.shape[-1]
    matrices = entries.flatten(-2).index_select(-1, _indices(dimensions, entries.device)[1])
    return matrices.view(*entries.shape[:-2], dimensions, dimensions)


@lru_cache(maxsize=16)
def _indices(dimensions: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Flat indices in a matrix of the entries by shift, and among these (D // 2 + 1, D) of the entries of a matrix."""
    columns = torch.arange(dimensions, device=device)
    rows, steps = columns[:, None], torch.arange(dimensions // 2 + 1, device=device)[:, None]
    shift = (columns - rows) % dimensions  # (D, D)
    near = torch.where(columns > rows, 2 * shift <= dimensions, 2 * shift < dimensions)  # each pair has one entry
    entries = torch.where(near, shift * dimensions + rows, (dimensions - shift) * dimensions + columns)
    return (columns * dimensions + (columns + steps) % dimensions).flatten(), entries.flatten()


def matrix_sweep(components: Components, num_data: int) -> Sweep:
    """Choose the sweep for factors (R, K, D, D): products of coordinates where accurate, otherwise whitening."""
    offsets, means, factors = components
    # All components share the products of coordinates; for few components whitening is faster, as measured.
    if 4 * offsets.numel() >= min(means.shape[-1], 32):
        precisions = factors @ factors.mT
        identity = torch.eye(factors.shape[-1], dtype=WORK, device=factors.device)
        variances = torch.linalg.solve_triangular(factors, identity, upper=True).square().sum(-2)
        scales = (means.square() + variances).sqrt()
        if suffice(((precisions.abs() @ scales[..., None])[..., 0] * scales).sum(-1)):
            pulls = (precisions @ means[..., None])[..., 0]
            return MomentSweep(components, pulls, shifted(precisions), unshifted, num_data)
    return MatrixSweep(components, num_data)


def scale_sweep(components: Components, num_data: int) -> Sweep:
    """Choose the sweep for factors (R, K, D): squares of coordinates where accurate, otherwise whitening."""
    _, means, factors = components
    if not suffice((means * factors).square().sum(-1) + means.shape[-1]):
        return ScaleSweep(components, num_data)
    precisions = factors.square()
    return MomentSweep(components, precisions * means, precisions[..., None, :], lambda rows: rows[..., 0, :], num_data)


class SharedSweep(Sweep):
    """Coordinates whitened once for all components: scores are linear in them but for a term that all share.

    Scatters need the products of the rows with themselves, weighted by row, and nothing else for each component. Takes
    components with factors (R, D, D), and means in whitened coordinates (R, K, D).
    """

    def __init__(self, components: Components, whitened_means: Tensor, num_data: int) -> None:
        offsets, _, self.factors = components
        restarts, count, dimensions = whitened_means.shape
        self.means = whitened_means
        self.offsets = (offsets - 0.5 * whitened_means.square().sum(-1))[..., None]
        self.whitening = self.factors.mT.reshape(restarts * dimensions, dimensions)
        self.rows = chunk_rows((2 * restarts + 1) * dimensions, offsets, num_data)
        self.workspace = offsets.new_empty(2 * restarts * dimensions * self.rows)
        self.centred = offsets.new_empty(dimensions * self.rows)
        self.results = offsets.new_empty(restarts * count * self.rows)
        self.first = torch.zeros_like(whitened_means)
        self.second = torch.zeros_like(self.factors)

    def scores(self, points: Tensor, centre: Tensor) -> Tensor:
        (size, dimensions), (restarts, count, _) = points.shape, self.means.shape
        self.z, self.scaled = taken(self.workspace, 2, restarts, dimensions, size)
        rows = centred(points, centre, self.centred)
        torch.mm(self.whitening, rows, out=self.z.view(restarts * dimensions, size))
        torch.mul(self.z, self.z, out=self.scaled)
        scores = taken(self.results, restarts, count, size)
        torch.baddbmm(self.offsets, self.means, self.z, out=scores)
        scores.sub_(self.scaled.sum(1, keepdim=True), alpha=0.5)
        return scores.flatten(0, 1)

    def add(self, weights: Tensor) -> None:
        weights = weights.view(*self.means.shape[:2], -1)
        self.first.baddbmm_(weights, self.z.mT)
        torch.mul(self.z, weights.sum(1, keepdim=True), out=self.scaled)
        self.second.baddbmm_(self.scaled, self.z.mT)

    def sums(self, counts: Tensor) -> tuple[Tensor, Tensor]:
        away = self.first - counts[..., None] * self.means
        second = self.second - self.means.mT @ self.first - away.mT @ self.means
        # Scatters (R, 1, D, D) of all components together.
        scatters = unwhitened(unwhitened(second, self.factors).mT, self.factors)[:, None]
        return unwhitened(away, self.factors), (scatters + scatters.mT) / 2
