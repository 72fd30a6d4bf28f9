"""Which part of a curvature matrix is kept, and the precision made of it: here all of it, or dense blocks."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar

import torch
from torch import Tensor

from posterity.curvature.curvature import Rows
from posterity.curvature.survey import Place, Survey, survey
from posterity.jacobians.jacobian import Stacked
from posterity.model.joint import Joint
from posterity.precisions.block import BlockDiagonal as BlockDiagonalPrecision
from posterity.precisions.dense import Dense
from posterity.precisions.low_rank import LowRank as LowRankPrecision
from posterity.precisions.precision import Precision

Sums = dict[str, Tensor]

RECENT = "recent "  # begins the names of sums over the last few batches, in the number type of the weights
TOGETHER = 8  # batches in them: to add each batch to sums in float64 would take as long as its products


class Structure(ABC):
    """How the curvature over R weights is held while it is summed over rows, in one or more passes over the data.

    `add` takes the sums so far (empty at first) and gives new ones; it may overwrite those it is given.
    """

    needs_columns: ClassVar[bool] = False
    """Whether it can be had of curvatures with columns only."""

    @property
    def passes(self) -> int:
        """Passes over the data."""
        return 1

    @abstractmethod
    def add(self, sums: Sums, rows: Rows, number: int) -> Sums:
        """The sums with these rows added, in pass `number`."""

    def end(self, sums: Sums, rows: Rows, number: int, prior: Tensor) -> Sums:
        """The sums after pass `number`, whose last rows were `rows`; `prior` (R,) is the prior's precision."""
        return sums

    def check_prior(self, places: Sequence[Place], prior: Tensor) -> None:
        """A ValueError where `precision` could not take this prior (R,), before any pass is made."""
        return

    @abstractmethod
    def precision(self, sums: Sums, places: Sequence[Place], scale: float | Tensor, prior: Tensor) -> Precision:
        """scale C + diag(prior) for the sums C over all rows; `places` as in the survey, none for a `Density`."""

    @abstractmethod
    def bytes(self, survey: Survey, num_data: int, columns: int) -> int:
        """What the sums and the precision take at most, for `columns` columns a row."""


def added(sums: Sums, **values: Tensor) -> Sums:
    """The sums with each value added to the one of its name, in place and in the number type of the sum."""
    for name, value in values.items():
        sums[name] = sums[name].add_(value) if name in sums else value
    return sums


def counted(sums: Sums) -> Sums:
    """The sums one batch later: now and then the recent ones are added to those in float64."""
    batches = sums["batches"] + 1 if "batches" in sums else torch.ones((), dtype=torch.int64)
    return {**(settled(sums) if int(batches) % TOGETHER == 0 else sums), "batches": batches}


def settled(sums: Sums) -> Sums:
    """The sums with the recent ones in them, in float64."""
    recent = {name.removeprefix(RECENT): value for name, value in sums.items() if name.startswith(RECENT)}
    rest = {name: value for name, value in sums.items() if not name.startswith(RECENT)}
    return added(rest, **{name: value if name in rest else value.to(torch.float64) for name, value in recent.items()})


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
        blocks = tuple(place.block for place in places)
        parts = tuple(Dense(sums[str(i)] * scale, block.gather(prior)) for i, block in enumerate(blocks))
        return BlockDiagonalPrecision(blocks, parts, prior.shape[-1])

    def bytes(self, survey: Survey, num_data: int, columns: int) -> int:
        """Sums, precision and factor of each layer with a copy, and two more of the largest."""
        sizes = [place.block.size**2 for place in survey.places]
        return 8 * (4 * sum(sizes) + 2 * max(sizes))
