"""The whole curvature matrix."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from posterity.curvature.rows import Rows
from posterity.curvature.structure import Structure, Sums, added
from posterity.curvature.survey import Place, Survey
from posterity.numerics.dense import Dense
from posterity.numerics.low_rank import LowRank as LowRankPrecision
from posterity.numerics.precision import Precision


@dataclass(frozen=True)
class Full(Structure):
    """The whole matrix, R x R; or its N K columns, where there are fewer of those than weights.

    **Math**: C = sum_n J_n^T S_n S_n^T J_n as a matrix, or as the factor whose rows are the (J_n^T S_n)^T.

    **Limit**: exact.

    **Cost**: R^2 N K to add up and R^3 to factor, or R (N K)^2 and (N K)^3 in the dual form.

    **References**: MacKay (1992).

    **Example**:

    >>> Full().passes
    1
    """

    def add(self, sums: Sums, rows: Rows, number: int) -> Sums:
        """Rows of the factor while they are few, else the matrix."""
        if not rows.factored:
            return added(sums, matrix=rows.matrix())
        for piece in rows.jacobians():
            jacobian = piece.jacobian
            outputs = max(1, prod(piece.outputs.shape[1:]))
            # Not by the columns of this piece: how many go at once differs by piece, the form of the sums must not.
            if rows.joint.num_data * rows.curvature.num_columns(outputs) < jacobian.size:
                part = jacobian.rows().flatten(0, 1).to(torch.float64)
                sums["rows"] = torch.cat([sums["rows"], part]) if "rows" in sums else part
                continue
            for _, chunk in jacobian.chunks():
                part = chunk.rows().flatten(0, 1).to(torch.float64)
                sums = added(sums, matrix=part.T @ part)
        return sums

    def precision(self, sums: Sums, places: Sequence[Place], scale: float | Tensor, prior: Tensor) -> Precision:
        """Dense, or low rank plus diagonal."""
        if "matrix" in sums:
            return Dense(sums["matrix"] * scale, prior)
        rows = sums["rows"] * (scale**0.5)
        if bool((prior > 0).all()):
            return LowRankPrecision(rows, prior)
        return Dense(rows.T @ rows, prior)  # says what is wrong, if it is singular

    def bytes(self, survey: Survey, num_data: int, columns: int) -> int:
        """Matrix, what is added to it, precision, factor and copies between them; or rows and their inner products."""
        size, rows = survey.size, num_data * columns
        return 8 * 4 * (rows * size + rows**2) if rows < size else 8 * 6 * size**2
