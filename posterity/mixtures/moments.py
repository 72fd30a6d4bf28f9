"""The quick way through a chunk of rows: scores and sums are linear in the products x_i x_j of centred coordinates."""

from collections.abc import Callable

import torch
from torch import Tensor

from posterity.mixtures.covariance import Sweep
from posterity.mixtures.rows import WORK, Components, chunk_rows, taken

# The digits that may cancel: a component lies |(mean - centre) A| standard deviations from the centre, and its square
# times the rounding of a number is the error of a score, and of a covariance relative to itself.
TOLERATED = 1e-11


def moments_suffice(whitened_means: Tensor) -> bool:
    """Whether no component lies so far from the centre, in its own standard deviations, that products lose digits.

    Takes (mean - centre) A (R, K, D). 1e-11 is met up to about 200 standard deviations.
    """
    farthest = whitened_means.square().sum(-1).amax()
    return bool(farthest * torch.finfo(WORK).eps <= TOLERATED)


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
    whitened = means[..., None, :] @ factors  # (R, K, 1, D)
    if not moments_suffice(whitened[..., 0, :]):
        return None
    pulls = (whitened @ factors.mT)[..., 0, :]
    return MomentSweep(components, pulls, shifted(factors @ factors.mT), unshifted, num_data)


def scale_moments(components: Components, num_data: int) -> MomentSweep | None:
    """The quick sweep for factors (R, K, D); None where it would lose digits."""
    _, means, factors = components
    if not moments_suffice(means * factors):
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
    here, there = _places(matrices)
    return matrices[..., here, there]


def unshifted(entries: Tensor) -> Tensor:
    """The symmetric matrix (..., D, D) that has these entries by shift."""
    dimensions = entries.shape[-1]
    matrices = entries.new_empty(*entries.shape[:-2], dimensions, dimensions)
    here, there = _places(matrices)
    matrices[..., here, there] = entries
    matrices[..., there, here] = entries
    return matrices


def _places(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and columns (D // 2 + 1, D) of the entries by shift."""
    dimensions = matrices.shape[-1]
    here = torch.arange(dimensions, device=matrices.device)
    steps = torch.arange(dimensions // 2 + 1, device=matrices.device)
    return here.expand(len(steps), -1), (here + steps[:, None]) % dimensions
