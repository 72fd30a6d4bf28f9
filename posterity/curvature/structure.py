"""Structures: how much of a curvature matrix is kept. Here the whole matrix, and dense blocks."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from posterity.curvature.curvature import Rows
from posterity.curvature.survey import Place, Survey
from posterity.jacobians.jacobian import Stacked, chunk_size
from posterity.precisions.block import BlockDiagonal as BlockDiagonalPrecision
from posterity.precisions.dense import Dense
from posterity.precisions.low_rank import LowRank as LowRankPrecision
from posterity.precisions.precision import Precision
from posterity.processes import Group

Sums = dict[str, Tensor]

ROWS = "rows"  # the entry whose values for parts of the rows are joined, not added
BATCHES = "batches"  # the number of batches
RECENT = "recent "  # prefix of sums over the last few batches, in the dtype of the weights
TOGETHER = 8  # number of those batches: adding each batch in float64 would take as long as its products


class Products(NamedTuple):
    """Multiply-adds `a_row` that a structure adds, those `once` at the end, and the numbers `summed` over the rows."""

    a_row: int
    once: int
    summed: int


class Structure(ABC):
    """The form in which a curvature over R weights is summed over rows, in one or more passes over the data.

    `add` takes the sums so far (empty at first) and returns new ones; it may overwrite its argument.
    """

    needs_columns: ClassVar[bool] = False
    """Whether the curvature must have columns."""

    @property
    def passes(self) -> int:
        """Number of passes over the data."""
        return 1

    @abstractmethod
    def add(self, sums: Sums, rows: Rows, number: int) -> Sums:
        """Add rows to the sums, in pass `number`."""

    def fixed(self, name: str, number: int) -> bool:
        """Whether an entry of the sums is no sum over rows in pass `number`: `add` makes the same of all rows."""
        return name == BATCHES

    def end(self, sums: Sums, rows: Rows, number: int, prior: Tensor) -> Sums:
        """Finish the sums of pass `number`, whose last rows were `rows`; `prior` (R,) is the prior precision."""
        return sums

    def check_prior(self, places: Sequence[Place], prior: Tensor) -> None:
        """Raise a ValueError, before any pass, where `precision` could not take this prior (R,)."""
        return

    @abstractmethod
    def precision(self, sums: Sums, places: Sequence[Place], scale: float | Tensor, prior: Tensor) -> Precision:
        """scale C + diag(prior) for the sums C over all rows; `places` from the survey, empty for a `Density`."""

    def whole(self, survey: Survey) -> int:
        """Weights of the largest matrix that is kept whole, apart from small ones."""
        return 0

    @abstractmethod
    def bytes(self, survey: Survey, num_data: int, columns: int) -> int:
        """Bytes of the sums, which are stored and read again, and of the precision made of them at the end.

        A row has `columns` columns. Layers that keep their diagonal for want of a rule are bounded from above.
        """

    def making_bytes(self, survey: Survey) -> int:
        """Bytes that the precision takes while it is made, beyond `bytes`."""
        return 0

    @abstractmethod
    def summed_bytes(self, survey: Survey, num_data: int, columns: int, itemsize: int) -> int:
        """Bytes of the sums in a pass over the rows, with what is added to them; numbers of rows have `itemsize`."""

    def products(self, survey: Survey, num_data: int, columns: int) -> Products | None:
        """Multiply-adds on top of the passes through the network; by default None, not known."""
        return None


def added(sums: Sums, **values: Tensor) -> Sums:
    """Add each value to the sum of its name, in place and in the dtype of the sum."""
    for name, value in values.items():
        sums[name] = sums[name].add_(value) if name in sums else value
    return sums


def counted(sums: Sums) -> Sums:
    """Count a batch; every `TOGETHER` batches the recent sums are added to the sums in float64."""
    batches = sums[BATCHES] + 1 if BATCHES in sums else torch.ones((), dtype=torch.int64)
    return {**(settled(sums) if int(batches) % TOGETHER == 0 else sums), BATCHES: batches}


def settled(sums: Sums) -> Sums:
    """Add the recent sums to the sums in float64."""
    recent = {name.removeprefix(RECENT): value for name, value in sums.items() if name.startswith(RECENT)}
    rest = {name: value for name, value in sums.items() if not name.startswith(RECENT)}
    return added(rest, **{name: value if name in rest else value.to(torch.float64) for name, value in recent.items()})


def add_shared(
    structure: Structure, sums: Sums, rows: Rows, number: int, processes: Group, further: Callable[[Rows], list[Tensor]]
) -> tuple[Sums, list[Tensor]]:
    """As `structure.add`, with the rows shared by several processes; also the sums of `further` tensors of rows."""
    fixed = {name: value for name, value in sums.items() if structure.fixed(name, number)}
    after: Sums = {}
    names: list[str] = []
    size = rows.data[1].size

    def part(low: int, high: int) -> list[Tensor]:
        piece = rows.part(low, high)
        result = structure.add(dict(fixed), piece, number)
        names[:] = sorted(name for name in result if not structure.fixed(name, number))
        after.update((name, value) for name, value in result.items() if name not in names)
        if ROWS in result:
            each = len(result[ROWS]) // (high - low)
            whole = result[ROWS].new_zeros(size * each, result[ROWS].shape[1])
            whole[low * each : high * each] = result[ROWS]
            result[ROWS] = whole
        return [*(result[name] for name in names), *further(piece)]

    totals = processes.total(part, size)
    new = dict(zip(names, totals, strict=False))
    held = {name: value for name, value in sums.items() if name not in fixed}
    if ROWS in new and ROWS in held:
        held[ROWS] = torch.cat([held[ROWS], new.pop(ROWS)])
    held = added(held, **new)
    if BATCHES in after and int(after[BATCHES]) % TOGETHER == 0:
        held = settled(held)
    return {**held, **after}, totals[len(names) :]


@dataclass(frozen=True)
class Full(Structure):
    """The whole matrix, R x R; or its N K columns, where there are fewer of those than weights: function space.

    **Math**: C = sum_n J_n^T S_n S_n^T J_n as a matrix, or as the factor whose rows are the (J_n^T S_n)^T. With the
    factor, moments and evidence follow from the Gram matrix (N K, N K) of these rows under the prior: the posterior is
    that of a Gaussian process with the kernel J prior^-1 J^T (`precisions.LowRank`).

    **Limit**: exact in both forms. All rows are used: the kernel form leaves none out.

    **Cost**: R^2 N K to add up and R^3 to factor, or R (N K)^2 and (N K)^3 in the dual form, which keeps some four
    times N K R numbers; then R N K for each row of a prediction.

    **References**: MacKay (1992); Khan et al. (2019), Approximate inference turns deep networks into Gaussian
    processes, for the dual form.

    **Example**:

    >>> Full().passes
    1
    """

    def add(self, sums: Sums, rows: Rows, number: int) -> Sums:
        if not rows.factored:
            return added(sums, matrix=rows.matrix())
        columns = list[Tensor]()
        for piece in rows.jacobians(between_layers=True, whole=rows.size):
            jacobian = piece.jacobian
            outputs = max(1, prod(piece.outputs.shape[1:]))
            # Not by the columns of this piece, whose number varies: all pieces must use one form.
            closed = isinstance(jacobian, Stacked) and jacobian.parts[0].closed  # with a column for each output
            count = outputs if closed else rows.num_columns(outputs, rows.size)
            if rows.joint.num_data * count < jacobian.size:
                columns.append(jacobian.rows().flatten(0, 1).to(torch.float64))
                continue
            sums["matrix"] = jacobian.gram(sums.get("matrix"))
        if columns:
            sums[ROWS] = torch.cat([sums[ROWS], *columns] if ROWS in sums else columns)
        return sums

    def precision(self, sums: Sums, places: Sequence[Place], scale: float | Tensor, prior: Tensor) -> Precision:
        if "matrix" in sums:
            return Dense(sums["matrix"] * scale, prior)
        rows = sums[ROWS] if scale == 1.0 else sums[ROWS] * (scale**0.5)
        if bool((prior > 0).all()):
            return LowRankPrecision(rows, prior)
        return Dense(rows.T @ rows, prior)  # raises an informative error if it is singular

    def whole(self, survey: Survey) -> int:
        return survey.size

    def bytes(self, survey: Survey, num_data: int, columns: int) -> int:
        # Sum, its copy, the scaled matrix, the precision and its factor; or rows, their copy, and twice scaled.
        size, rows = survey.size, num_data * columns
        if rows < size:
            return 8 * max(4 * rows * size + rows**2, 2 * rows * size + 4 * rows**2)
        return 8 * 5 * size**2

    def summed_bytes(self, survey: Survey, num_data: int, columns: int, itemsize: int) -> int:
        size, rows = survey.size, num_data * columns
        return 8 * 2 * rows * size if rows < size else 8 * 2 * size**2 + _dense_rows(rows * size, itemsize)

    def products(self, survey: Survey, num_data: int, columns: int) -> Products | None:
        small = min(survey.size, num_data * columns)  # inner products of rows, where there are fewer of them
        return Products(columns * survey.size * small, small**3 // 3, survey.size**2)


def _dense_rows(entries: int, itemsize: int) -> int:
    """Bytes of a chunk of dense rows, and of the same in float64."""
    return (8 + itemsize) * min(entries, chunk_size(torch.device("cpu")))


@dataclass(frozen=True)
class BlockDiagonal(Structure):
    """Independent layers, each with its full matrix.

    **Math**: C restricted to the weights of each layer, a bias with its weight; tied tensors have a block each.

    **Limit**: exact within layers; between them correlations are left out.

    **Cost**: the square of the weights of the largest layer in memory, their cube to factor.

    **References**: Martens and Grosse (2015), section 4.2, for what the blocks of KFAC stand for.

    **Example**:

    >>> BlockDiagonal().passes
    1
    """

    def add(self, sums: Sums, rows: Rows, number: int) -> Sums:
        if not rows.factored:
            whole = rows.matrix()
            for layer, place in enumerate(rows.places):
                index = place.block.index.to(whole.device)
                added(sums, **{str(layer): whole[index][:, index]})
            return sums
        largest = max(place.block.size for place in rows.places)
        for piece in rows.jacobians(whole=largest):
            if not isinstance(piece.jacobian, Stacked):
                raise TypeError("Blocks are of whole tensors. Got single weights. Use Full() or Diagonal().")
            for layer, place in enumerate(rows.places):
                sums[str(layer)] = piece.jacobian.part(place.block).gram(sums.get(str(layer)))
        return sums

    def precision(self, sums: Sums, places: Sequence[Place], scale: float | Tensor, prior: Tensor) -> Precision:
        blocks = tuple(place.block for place in places)
        parts = tuple(Dense(sums[str(i)] * scale, block.gather(prior)) for i, block in enumerate(blocks))
        return BlockDiagonalPrecision(blocks, parts, prior.shape[-1])

    def whole(self, survey: Survey) -> int:
        return max(place.block.size for place in survey.places)

    def bytes(self, survey: Survey, num_data: int, columns: int) -> int:
        # Sum, its copy, the scaled matrix, the precision and its factor of each layer.
        return 8 * 5 * sum(place.block.size**2 for place in survey.places)

    def summed_bytes(self, survey: Survey, num_data: int, columns: int, itemsize: int) -> int:
        sizes = [place.block.size for place in survey.places]
        dense = _dense_rows(num_data * columns * max(sizes), itemsize)
        return 8 * (sum(size**2 for size in sizes) + max(sizes) ** 2) + dense
