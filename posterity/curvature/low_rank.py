"""Low-rank curvature: the largest eigenvalues with their eigenvectors."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from posterity.curvature.curvature import Rows
from posterity.curvature.structure import Structure, Sums, added
from posterity.curvature.survey import Place, Survey
from posterity.errors import positive_whole
from posterity.precisions.low_rank import LowRank as LowRankPrecision
from posterity.precisions.precision import Precision

CLOSED = 1e-10  # share of the largest norm at which a vector counts as zero


@dataclass(frozen=True)
class LowRank(Structure):
    """The part of the curvature along its largest eigenvalues, by Lanczos iteration over whole passes.

    **Math**: C ~ V diag(t) V^T, where T = Q^T C Q is tridiagonal in the Krylov basis Q of `iterations` vectors and
    (t, V) are its `rank` largest positive eigenvalues with their vectors Q y. Where the basis closes before that
    (repeated eigenvalues, as of a linear layer with many outputs), it continues from a new random vector.

    **Limit**: exact when the rank of C is at most `rank`; else the rest of C is left out, so variances there are too
    large (the prior's), and so is the log evidence, whose determinant lacks the rest: tuning by it favours wide priors.
    Take the rank large, or tuning=None.

    **Cost**: `iterations` passes, each with one product with the curvature (about three backward passes).

    **References**: Golub and Van Loan (2013), chapter 10, with full reorthogonalisation.

    **Example**:

    >>> LowRank(rank=10).passes
    20
    """

    rank: int = 20
    iterations: int | None = None

    def __post_init__(self) -> None:
        positive_whole("LowRank.rank", self.rank)
        if self.iterations is not None:
            positive_whole("LowRank.iterations", self.iterations, "or None")
            if self.iterations < self.rank:
                raise ValueError(
                    f"LowRank.iterations must be at least rank = {self.rank}. Got {self.iterations}. "
                    "Twice the rank is a good number."
                )

    @property
    def passes(self) -> int:
        """One for each iteration, by default twice the rank."""
        return 2 * self.rank if self.iterations is None else self.iterations

    def add(self, sums: Sums, rows: Rows, number: int) -> Sums:
        if "basis" not in sums:
            start = rows.key.fold("lanczos").normal((1, rows.size), torch.float64, rows.theta.device)
            sums["basis"] = start / start.norm()
            sums["tridiagonal"] = start.new_zeros(0, 2)
        if len(sums["basis"]) <= number:  # the basis spans all that the curvature reaches
            return sums
        return added(sums, product=rows.products(sums["basis"][-1:])[0])

    def fixed(self, name: str, number: int) -> bool:
        return name != "product"

    def end(self, sums: Sums, rows: Rows, number: int, prior: Tensor) -> Sums:
        if "product" not in sums:
            return sums
        basis, vector = sums["basis"], sums.pop("product")
        size = vector.norm()
        diagonal = basis[-1] @ vector
        for _ in range(2):  # twice is enough to be orthogonal to rounding
            vector = vector - basis.T @ (basis @ vector)
        beside = vector.norm()
        largest = torch.cat([sums["tridiagonal"].flatten(), size.view(1)]).abs().max()
        closed = bool(beside <= CLOSED * largest)
        row = torch.stack([diagonal, torch.zeros_like(beside) if closed else beside])
        sums["tridiagonal"] = torch.cat([sums["tridiagonal"], row[None]])
        if number + 1 == min(self.passes, basis.shape[1]) or bool(size <= CLOSED * largest):
            return sums  # nothing is left, or nothing that the curvature does not take to zero
        if closed:
            vector = rows.key.fold("lanczos").fold(number).normal((basis.shape[1],), torch.float64, basis.device)
            for _ in range(2):
                vector = vector - basis.T @ (basis @ vector)
        sums["basis"] = torch.cat([basis, (vector / vector.norm())[None]])
        return sums

    def precision(self, sums: Sums, places: Sequence[Place], scale: float | Tensor, prior: Tensor) -> Precision:
        diagonal, beside = sums["tridiagonal"].unbind(-1)
        matrix = torch.diag(diagonal)
        if len(diagonal) > 1:
            matrix = matrix + torch.diag(beside[:-1], 1) + torch.diag(beside[:-1], -1)
        values, vectors = torch.linalg.eigh(matrix)
        keep = values > len(values) * torch.finfo(torch.float64).eps * values.abs().max()
        values, vectors = values[keep][-self.rank :], vectors[:, keep][:, -self.rank :]
        factor = (values * scale).sqrt().unsqueeze(-1) * (vectors.T @ sums["basis"])
        return LowRankPrecision(factor, prior)

    def bytes(self, survey: Survey, num_data: int, columns: int) -> int:
        return 8 * (2 * self.passes + 3 * self.rank) * survey.size  # the basis, its copy, and the factor twice scaled

    def summed_bytes(self, survey: Survey, num_data: int, columns: int, itemsize: int) -> int:
        return 8 * (2 * self.passes + 2) * survey.size  # the basis grows by copies
