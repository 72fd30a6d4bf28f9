"""A random estimate of the diagonal of any curvature."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from posterity.curvature.rows import Rows
from posterity.curvature.structure import Structure, Sums, added
from posterity.curvature.survey import Place, Survey
from posterity.errors import positive_whole
from posterity.numerics.diagonal import Diagonal as DiagonalPrecision
from posterity.numerics.precision import Precision


@dataclass(frozen=True)
class Hutchinson(Structure):
    """The diagonal, estimated from products with random signs: for curvatures whose own diagonal is dear.

    **Math**: C_rr is estimated by 1/m sum_j v_jr (C v_j)_r with m = `probes` vectors v_j of independent signs.

    **Limit**: unbiased; the variance of an entry is sum_{s != r} C_rs^2 / m. Of a curvature that is a sum of squares,
    estimates below zero count as zero (its own `Diagonal` is exact and no dearer); of a Hessian, those that leave the
    precision not positive are refused: take more probes.

    **Cost**: m products with the curvature for each batch, each about two backward passes.

    **References**: Hutchinson (1990); Bekas et al. (2007), An estimator for the diagonal of a matrix.

    **Example**:

    >>> Hutchinson(probes=8).passes
    1
    """

    probes: int = 32

    def __post_init__(self) -> None:
        positive_whole("Hutchinson.probes", self.probes)

    def add(self, sums: Sums, rows: Rows, number: int) -> Sums:
        """The same signs for all batches, since the curvature is their sum."""
        if "signs" not in sums:
            size = rows.size
            noise = rows.key.fold("signs").uniform((self.probes, size), torch.float32, rows.theta.device)
            sums["signs"] = (noise > 0.5).to(torch.int8)
        signs = 2.0 * sums["signs"].to(torch.float64) - 1.0
        sums = added(sums, diagonal=(signs * rows.products(signs)).mean(0))
        sums["squares"] = sums["diagonal"].new_tensor(float(rows.factored))
        return sums

    def precision(self, sums: Sums, places: Sequence[Place], scale: float | Tensor, prior: Tensor) -> Precision:
        """Diagonal."""
        diagonal = sums["diagonal"]
        return DiagonalPrecision((diagonal.clamp_min(0.0) if sums["squares"] else diagonal) * scale, prior)

    def bytes(self, survey: Survey, num_data: int, columns: int) -> int:
        """Signs and products of all probes."""
        return (1 + 3 * 8) * self.probes * survey.size
