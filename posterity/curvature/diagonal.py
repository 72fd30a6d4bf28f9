"""Diagonal curvature: exact, and estimated by random probes."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from posterity.curvature.curvature import Rows
from posterity.curvature.structure import RECENT, Products, Structure, Sums, added, counted, settled
from posterity.curvature.survey import Place, Survey
from posterity.errors import positive_whole
from posterity.precisions.diagonal import Diagonal as DiagonalPrecision
from posterity.precisions.precision import Precision


@dataclass(frozen=True)
class Diagonal(Structure):
    """The exact diagonal: independent weights.

    **Math**: C_rr = sum_n sum_k (J_n^T S_n)_rk^2, exact, tied weights and shared positions included.

    **Limit**: variances are too small, since 1 / C_rr is the variance of a weight given all others.

    **Cost**: K backward passes and one product of squares per layer; for a `Hessian` the whole matrix, which
    `Hutchinson` avoids.

    **References**: LeCun et al. (1990), Optimal brain damage; Dangel et al. (2020), BackPACK.

    **Example**:

    >>> Diagonal().passes
    1
    """

    def add(self, sums: Sums, rows: Rows, number: int) -> Sums:
        if not rows.factored:
            return added(sums, diagonal=rows.diagonal())
        sums[RECENT + "diagonal"] = rows.squares(sums.get(RECENT + "diagonal"))
        return counted(sums)

    def end(self, sums: Sums, rows: Rows, number: int, prior: Tensor) -> Sums:
        return settled(sums)

    def precision(self, sums: Sums, places: Sequence[Place], scale: float | Tensor, prior: Tensor) -> Precision:
        return DiagonalPrecision(sums["diagonal"] * scale, prior)

    def bytes(self, survey: Survey, num_data: int, columns: int) -> int:
        return 8 * 4 * survey.size  # the sum, its copy, the scaled sum, and that with the prior

    def summed_bytes(self, survey: Survey, num_data: int, columns: int, itemsize: int) -> int:
        return (8 + itemsize) * survey.size

    def products(self, survey: Survey, num_data: int, columns: int) -> Products | None:
        """The squares of the gradients: they factor where a layer acts at one position, else each is formed."""
        if any(place.kind != "matrix" for place in survey.places):
            return None
        a_row = 0
        for place in survey.places:
            positions = place.positions * place.times
            a_row += place.block.size * (1 if positions == 1 else columns * (positions + 1))
        return Products(a_row, 0, survey.size)


@dataclass(frozen=True)
class Hutchinson(Structure):
    """The diagonal, estimated from products with random signs, for curvatures with an expensive diagonal.

    **Math**: C_rr is estimated by 1/m sum_j v_jr (C v_j)_r with m = `probes` vectors v_j of independent signs.

    **Limit**: unbiased; the variance of an entry is sum_{s != r} C_rs^2 / m. Of a curvature that is a sum of squares,
    estimates below zero count as zero (`Diagonal` is exact there and no more expensive); of a Hessian, those that leave
    the precision not positive are refused: take more probes.

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
        if "signs" not in sums:  # shared by all batches, since the curvature is their sum
            noise = rows.key.fold("signs").uniform((self.probes, rows.size), torch.float32, rows.theta.device)
            sums["signs"] = (noise > 0.5).to(torch.int8)
        signs = 2.0 * sums["signs"].to(torch.float64) - 1.0
        sums = added(sums, diagonal=(signs * rows.products(signs)).mean(0))
        sums["squares"] = sums["diagonal"].new_tensor(float(rows.factored))
        return sums

    def fixed(self, name: str, number: int) -> bool:
        return name in ("signs", "squares")

    def precision(self, sums: Sums, places: Sequence[Place], scale: float | Tensor, prior: Tensor) -> Precision:
        diagonal = sums["diagonal"]
        return DiagonalPrecision((diagonal.clamp_min(0.0) if sums["squares"] else diagonal) * scale, prior)

    def bytes(self, survey: Survey, num_data: int, columns: int) -> int:
        return (1 + 3 * 8) * self.probes * survey.size

    def summed_bytes(self, survey: Survey, num_data: int, columns: int, itemsize: int) -> int:
        return self.bytes(survey, num_data, columns)
