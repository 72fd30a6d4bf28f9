"""Whole curvature matrices of single layers."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from posterity.curvature.rows import Rows
from posterity.curvature.structure import Structure, Sums, added
from posterity.curvature.survey import Place, Survey, survey
from posterity.model.joint import Joint
from posterity.numerics.block_diagonal import BlockDiagonal as BlockDiagonalPrecision
from posterity.numerics.dense import Dense
from posterity.numerics.jacobian import Stacked
from posterity.numerics.precision import Precision


@dataclass(frozen=True)
class BlockDiagonal(Structure):
    """Independent layers, each with its whole matrix.

    **Math**: C restricted to the weights of each layer, a bias with its weight; tied tensors have a block each.

    **Limit**: exact within layers; between them correlations are left out.

    **Cost**: the square of the weights of the largest layer in memory, their cube to factor.

    **References**: Martens and Grosse (2015), section 4.2, for what the blocks of KFAC stand for.

    **Example**:

    >>> BlockDiagonal().passes
    1
    """

    def add(self, sums: Sums, rows: Rows, number: int) -> Sums:
        """The blocks of these rows."""
        assert isinstance(rows.joint, Joint)
        assert rows.batch is not None
        places = survey(rows.joint, rows.batch.inputs).places
        if not rows.factored:
            whole = rows.matrix()
            for number_, place in enumerate(places):
                index = place.block.index.to(whole.device)
                added(sums, **{str(number_): whole[index][:, index]})
            return sums
        for piece in rows.jacobians():
            if not isinstance(piece.jacobian, Stacked):
                raise TypeError("Blocks are of whole tensors. Got single weights. Use Full() or Diagonal().")
            for number_, place in enumerate(places):
                for _, chunk in piece.jacobian.part(place.block).chunks():
                    dense = chunk.rows().flatten(0, 1).to(torch.float64)
                    added(sums, **{str(number_): dense.T @ dense})
        return sums

    def precision(self, sums: Sums, places: Sequence[Place], scale: float | Tensor, prior: Tensor) -> Precision:
        """Block diagonal."""
        blocks = tuple(place.block for place in places)
        parts = tuple(Dense(sums[str(i)] * scale, block.gather(prior)) for i, block in enumerate(blocks))
        return BlockDiagonalPrecision(blocks, parts, prior.shape[-1])

    def bytes(self, survey: Survey, num_data: int, columns: int) -> int:
        """Sums, precision and factor of each layer with a copy, and two more of the largest."""
        sizes = [place.block.size**2 for place in survey.places]
        return 8 * (4 * sum(sizes) + 2 * max(sizes))
