"""The diagonal of a curvature matrix."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from posterity.curvature.rows import Rows
from posterity.curvature.structure import RECENT, Structure, Sums, added, counted, settled
from posterity.curvature.survey import Place, Survey
from posterity.numerics.diagonal import Diagonal as DiagonalPrecision
from posterity.numerics.precision import Precision


@dataclass(frozen=True)
class Diagonal(Structure):
    """The diagonal alone: weights independent.

    **Math**: C_rr = sum_n sum_k (J_n^T S_n)_rk^2, exact, tied weights and shared positions included.

    **Limit**: variances are too small, since 1 / C_rr is the variance of a weight given all others.

    **Cost**: K backward passes and one product of squares a layer; a `Hessian`'s comes from the whole matrix, for
    which `Hutchinson` is the estimate.

    **References**: LeCun et al. (1990), Optimal brain damage; Dangel et al. (2020), BackPACK.

    **Example**:

    >>> Diagonal().passes
    1
    """

    def add(self, sums: Sums, rows: Rows, number: int) -> Sums:
        """The diagonal of these rows; sums of a few batches are in the number type of the weights."""
        if not rows.factored:
            return added(sums, diagonal=rows.diagonal())
        sums[RECENT + "diagonal"] = rows.squares(sums.get(RECENT + "diagonal"))
        return counted(sums)

    def end(self, sums: Sums, rows: Rows, number: int, prior: Tensor) -> Sums:
        """With all that was added."""
        return settled(sums)

    def precision(self, sums: Sums, places: Sequence[Place], scale: float | Tensor, prior: Tensor) -> Precision:
        """Diagonal."""
        return DiagonalPrecision(sums["diagonal"] * scale, prior)

    def bytes(self, survey: Survey, num_data: int, columns: int) -> int:
        """Four vectors."""
        return 8 * 4 * survey.size
