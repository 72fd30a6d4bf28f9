"""The quick way through a chunk of rows: scores and sums are linear in the products x_i x_j of centred coordinates."""

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from posterity.mixtures.covariance import Sweep
from posterity.mixtures.rows import WORK, Components, chunk_rows, taken

# What products may lose: the error of a score, and of a covariance relative to itself, in a component's own directions.
TOLERATED = 1e-11


def suffice(sizes: Tensor) -> bool:
    """Whether products lose no digits that count, where `sizes` (R, K) is what they add up to a small number from.

    That is sum_ij |P_ij| s_i s_j with the precision P of a component and s_i^2 = E x_i^2 about the centre: large for a
    component many standard deviations from the centre (1e-11 allows about 200), and for strong correlations.
    """
    return bool(sizes.amax() * torch.finfo(WORK).eps <= TOLERATED)


class MomentSweep(Sweep):
    """Two products a chunk: coefficients times features are scores, weights times features are sums.

    The features are x_i x_{i + s}, indices going round, and x_i. A precision matrix needs the shifts s = 0 .. D // 2, a
    diagonal one s = 0 alone.
    All products come from one multiplication of the rows with a sliding view of themselves.
    """

    def __init__(
        self,
        components: Components,
        pulls: Tensor,
        precisions: Tensor,
        restore: Callable[[Tensor], Tensor],
        num_data: int,
    ) -> None:
        """Takes `pulls`, precision times mean (R, K, D), precisions by shift (R, K, S, D), and what turns entries by
        shift into the scatters of the kind.
        """
        restarts, count, shifts, dimensions = precisions.shape
        offsets, means, _ = components
        self.means, self.restore = means, restore
        numbers = (shifts + 1) * dimensions + shifts - 1
        self.rows = chunk_rows(numbers, offsets, num_data)
        self.shape = (restarts, count, shifts + 1, dimensions)
        # An even number of dimensions meets each pair twice at the last shift; x_i^2 is there once for half of P_ii.
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
        """Features of the chunk, times coefficients."""
        if len(points) != self.found.shape[1]:
            self._resize(len(points))
        torch.sub(points.mT, centre[:, None], out=self.centred)
        self.again.copy_(self.centred[: len(self.again)])
        torch.mul(self.around, self.centred, out=self.products)
        return torch.addmm(self.offsets, self.coefficients, self.features, out=self.found)

    def _resize(self, size: int) -> None:
        """Views of the workspace for chunks of this size: products, rows, and the first of these once more."""
        _, _, blocks, dimensions = self.shape
        shifts, used = blocks - 1, blocks * dimensions
        table = taken(self.workspace, used + shifts - 1, size)
        self.features, self.again = table[:used], table[used:]
        self.products = table[: shifts * dimensions].view(shifts, dimensions, size)
        self.centred = table[shifts * dimensions : used]
        self.around = table[shifts * dimensions :].unfold(0, dimensions, 1).mT  # (S, D, n)
        self.found = taken(self.results, len(self.offsets), size)

    def add(self, weights: Tensor) -> None:
        """Weights of the chunk, times features."""
        self.totals.addmm_(weights, self.features.mT)

    def sums(self, counts: Tensor) -> tuple[Tensor, Tensor]:
        """The sums, moved from the centre to the means."""
        totals = self.totals.view(self.shape)
        first, second = totals[:, :, -1], totals[:, :, :-1]
        away = first - counts[..., None] * self.means
        # (x - m)_i (x - m)_j = x_i x_j - m_i x_j - (x_i - m_i) m_j
        shifts = second.shape[2]
        return away, self.restore(second - by_shift(self.means, first, shifts) - by_shift(away, self.means, shifts))


def matrix_moments(components: Components, num_data: int) -> MomentSweep | None:
    """The quick sweep for factors (R, K, D, D); None where it would lose digits."""
    _, means, factors = components
    precisions = factors @ factors.mT
    identity = torch.eye(factors.shape[-1], dtype=WORK, device=factors.device)
    variances = torch.linalg.solve_triangular(factors, identity, upper=True).square().sum(-2)
    scales = (means.square() + variances).sqrt()
    if not suffice(((precisions.abs() @ scales[..., None])[..., 0] * scales).sum(-1)):
        return None
    pulls = (precisions @ means[..., None])[..., 0]
    return MomentSweep(components, pulls, shifted(precisions), unshifted, num_data)


def scale_moments(components: Components, num_data: int) -> MomentSweep | None:
    """The quick sweep for factors (R, K, D); None where it would lose digits."""
    _, means, factors = components
    if not suffice((means * factors).square().sum(-1) + means.shape[-1]):
        return None
    precisions = factors.square()
    return MomentSweep(
        components, precisions * means, precisions[..., None, :], lambda entries: entries[..., 0, :], num_data
    )


def by_shift(one: Tensor, other: Tensor, shifts: int) -> Tensor:
    """one_i other_{i + s} (..., S, D) of two vectors (..., D)."""
    around = torch.cat([other, other[..., : shifts - 1]], -1)
    return one[..., None, :] * around.unfold(-1, one.shape[-1], 1)


def shifted(matrices: Tensor) -> Tensor:
    """A symmetric matrix (..., D, D) by shifts (..., D // 2 + 1, D): its entries (i, i + s), indices going round."""
    dimensions = matrices.shape[-1]
    entries = matrices.flatten(-2).index_select(-1, _places(dimensions, matrices.device)[0])
    return entries.view(*matrices.shape[:-2], -1, dimensions)


def unshifted(entries: Tensor) -> Tensor:
    """The symmetric matrix (..., D, D) that has these entries by shift."""
    dimensions = entries.shape[-1]
    matrices = entries.flatten(-2).index_select(-1, _places(dimensions, entries.device)[1])
    return matrices.view(*entries.shape[:-2], dimensions, dimensions)


@lru_cache(maxsize=16)
def _places(dimensions: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Where in a matrix the entries by shift are, and where among these (of D // 2 + 1 by D) those of a matrix are."""
    here = torch.arange(dimensions, device=device)
    steps = torch.arange(dimensions // 2 + 1, device=device)[:, None]
    apart = (here - here[:, None]) % dimensions  # (D, D), of column from row
    near = torch.where(here > here[:, None], 2 * apart <= dimensions, 2 * apart < dimensions)  # each pair in one place
    back = torch.where(near, apart * dimensions + here[:, None], (dimensions - apart) * dimensions + here)
    return (here * dimensions + (here + steps) % dimensions).flatten(), back.flatten()
