"""Jacobians (N, D, R) of D outputs at N rows in R weights, held in factors and never formed whole."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property, reduce
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from posterity.numerics.layout import Block

CHUNK = 1 << 21  # entries of dense rows formed at a time on a CPU, whose caches are small
DEVICE_SHARE = 64  # times as many on a GPU, which needs large chunks
CACHED = 8  # one in this many of a chunk's entries fit in the cache, for work that reads them twice
SMALL_PARTS_ON = ("cpu",)
"""Devices with small caches and cheap calls, which work through small parts; others take all at once."""


def small_parts(device: torch.device) -> bool:
    """Whether this device works through small parts, and takes columns back through a network one at a time."""
    return device.type in SMALL_PARTS_ON


def chunk_size(device: torch.device, share: int = 1) -> int:
    """Number of entries formed at a time on this device; on a CPU divided by `share`."""
    return CHUNK // share if small_parts(device) else DEVICE_SHARE * CHUNK


class Outline(NamedTuple):
    """Shape, dtype and device of J (N, D, R)."""

    num_rows: int  # N
    num_outputs: int  # D
    size: int  # R
    dtype: torch.dtype  # of the factors
    device: torch.device

    @classmethod
    def like(cls, factor: Tensor, num_rows: int, num_outputs: int, size: int) -> "Outline":
        """The outline with the dtype and device of a factor."""
        return cls(num_rows, num_outputs, size, factor.dtype, factor.device)


class Jacobian(ABC):
    """J (N, D, R), row n and output d by weight r."""

    closed: ClassVar[bool] = False
    """Whether `gram` is formed without the dense rows."""

    @property
    @abstractmethod
    def outline(self) -> Outline:
        """Shape, dtype and device."""

    @property
    def num_rows(self) -> int:
        """N."""
        return self.outline.num_rows

    @property
    def num_outputs(self) -> int:
        """D."""
        return self.outline.num_outputs

    @property
    def size(self) -> int:
        """R."""
        return self.outline.size

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the factors."""
        return self.outline.dtype

    @property
    def device(self) -> torch.device:
        """The device of the factors."""
        return self.outline.device

    @abstractmethod
    def rows(self) -> Tensor:
        """J, dense (N, D, R)."""

    @abstractmethod
    def narrow(self, low: int, high: int) -> "Jacobian":
        """The rows `low` to `high`."""

    def double(self) -> "Jacobian":
        """The same with factors in float64."""
        if self.dtype == torch.float64:
            return self
        doubled: Jacobian = _double(self)
        return doubled

    def chunks(self, share: int = 1) -> Iterator[tuple[int, "Jacobian"]]:
        """Yield (first row, rows) in chunks whose dense form has at most `chunk_size` entries."""
        step = max(1, chunk_size(self.device, share) // max(1, self.num_outputs * self.size))
        for low in range(0, self.num_rows, step):
            yield low, self.narrow(low, min(self.num_rows, low + step))

    def squares(self) -> Tensor:
        """Sum of J^2 over rows and outputs, (R,)."""
        flat = (part.rows().flatten(0, 1) for _, part in self.chunks(CACHED))
        if small_parts(self.device):
            return added(torch.einsum("nr,nr->r", rows, rows) for rows in flat)
        return added(torch.linalg.vector_norm(rows, dim=0).square_() for rows in flat)  # which reads them once

    def gram(self, out: Tensor | None = None) -> Tensor:
        """Sum of J^T J over rows, (R, R) in float64, added to `out` if given."""
        for _, part in self.chunks():
            rows = part.rows().flatten(0, 1).to(torch.float64)
            out = rows.T @ rows if out is None else out.add_(rows.T @ rows)
        assert out is not None
        return out

    def summed(self) -> Tensor:
        """The sum over rows and outputs, (R,)."""
        return added(part.rows().sum((0, 1)) for _, part in self.chunks())

    def add_squares(self, block: Block, total: Tensor) -> None:
        """Add `squares` to the entries of `total` that a block names."""
        block.add(self.squares(), total)

    def weighted_gram(self, variance: Tensor) -> Tensor:
        """J diag(variance) J^T for each row, (N, D, D), with variances (R,)."""
        root = variance.sqrt()
        parts = []
        for _, part in self.chunks():
            scaled = part.rows() * root.to(part.dtype)
            parts.append(scaled @ scaled.mT)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def joint_gram(self, variance: Tensor) -> Tensor:
        """J diag(variance) J^T between all rows, (N D, N D), with variances (R,)."""
        scaled = (self.rows() * variance.sqrt().to(self.dtype)).flatten(0, 1)
        return scaled @ scaled.mT

    def weighted_squares(self, variance: Tensor) -> Tensor:
        """Diagonals of `weighted_gram`, (N, D), with variances (R,)."""
        parts = [part.rows().square() @ variance.to(part.dtype) for _, part in self.chunks(CACHED)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def row_draws(self, variance: Tensor, noise: Tensor) -> Tensor | None:
        """Draws of N(0, `weighted_gram`), (S, N, D), from standard normal noise; None where that matrix is needed."""
        return None

    def products(self, vectors: Tensor) -> Tensor:
        """J v, (S, N, D), for vectors v (S, R)."""
        vectors = vectors.to(self.dtype)
        return torch.cat([torch.einsum("ndr,sr->snd", part.rows(), vectors) for _, part in self.chunks()], 1)


@dataclass(frozen=True, eq=False)
class Explicit(Jacobian):
    """A dense J (N, D, R).

    >>> Explicit(torch.ones(2, 1, 3)).squares()
    tensor([2., 2., 2.])
    """

    dense: Tensor

    @property
    def outline(self) -> Outline:
        return Outline.like(self.dense, *self.dense.shape)

    def rows(self) -> Tensor:
        return self.dense

    def narrow(self, low: int, high: int) -> "Explicit":
        return Explicit(self.dense[low:high])


def as_jacobian(value: Tensor | Jacobian) -> Jacobian:
    """A dense tensor (N, D, R) as a Jacobian; a Jacobian as it is."""
    return Explicit(value) if isinstance(value, Tensor) else value


def halves(jacobian: Tensor | Jacobian, half: Callable[[Tensor], Tensor]) -> Iterator[Tensor]:
    """Apply `half`, (n, D, R) -> (..., n D, R), to chunks of dense rows; yields (..., n, D, R)."""
    for _, part in as_jacobian(jacobian).chunks():
        values = half(part.rows())
        yield values.reshape(*values.shape[:-2], part.num_rows, part.num_outputs, values.shape[-1])


@dataclass(frozen=True, eq=False)
class Selected(Jacobian):
    """Columns `index` (S,) of another Jacobian."""

    whole: Jacobian
    index: Tensor

    @property
    def outline(self) -> Outline:
        return self.whole.outline._replace(size=self.index.numel())

    def rows(self) -> Tensor:
        return torch.cat([part.rows()[..., self.index] for _, part in self.whole.chunks()])

    def narrow(self, low: int, high: int) -> "Selected":
        return Selected(self.whole.narrow(low, high), self.index)

    def weighted_gram(self, variance: Tensor) -> Tensor:
        if self._in_factors:
            return self.whole.weighted_gram(self._spread(variance))
        return super().weighted_gram(variance)

    def weighted_squares(self, variance: Tensor) -> Tensor:
        if self._in_factors:
            return self.whole.weighted_squares(self._spread(variance))
        return super().weighted_squares(variance)

    def products(self, vectors: Tensor) -> Tensor:
        return self.whole.products(self._spread(vectors))

    @property
    def _in_factors(self) -> bool:
        """Whether the whole has sums of squares without a dense form: tied weights are summed before squaring."""
        return isinstance(self.whole, Stacked) and all(isinstance(where, Block) for where, _ in self.whole.pieces)

    def _spread(self, vector: Tensor) -> Tensor:
        """Entries (..., S) at their indices in a vector (..., R) of zeros."""
        index = self.index.to(vector.device)
        return vector.new_zeros(*vector.shape[:-1], self.whole.size).index_copy(-1, index, vector)


@dataclass(frozen=True, eq=False)
class Stacked(Jacobian):
    """J over all R weights as a sum of parts, one per block; blocks of tied weights may overlap.

    >>> block = Block(("bias",), rows=2, columns=1, weight=1)
    >>> Stacked((block,), (Explicit(torch.ones(1, 1, 2)),), 4).rows()
    tensor([[[0., 1., 1., 0.]]])
    """

    blocks: tuple[Block, ...]
    parts: tuple[Jacobian, ...]
    total: int

    @property
    def outline(self) -> Outline:
        return self.parts[0].outline._replace(size=self.total)

    def rows(self) -> Tensor:
        dense = self.parts[0].rows().new_zeros(self.num_rows, self.num_outputs, self.total)
        for block, part in zip(self.blocks, self.parts, strict=True):
            dense = dense.index_add(2, block.index.to(dense.device), part.rows())
        return dense

    def narrow(self, low: int, high: int) -> "Stacked":
        return Stacked(self.blocks, tuple(part.narrow(low, high) for part in self.parts), self.total)

    def part(self, block: Block) -> Jacobian:
        """The derivatives in the weights of one block, in its order."""
        indices = [index for index, other in enumerate(self.blocks) if other.overlaps(block)]
        if len(indices) == 1 and self.blocks[indices[0]] == block:
            return self.parts[indices[0]]
        if not indices:  # weights that the outputs do not depend on
            zero = self.parts[0].narrow(0, 0).rows().new_zeros(())
            return Explicit(zero.expand(self.num_rows, self.num_outputs, block.size))
        return Selected(self.restricted([self.blocks[index] for index in indices]), block.index)

    def restricted(self, blocks: list[Block]) -> "Stacked":
        """The parts of these blocks alone, with zeros elsewhere."""
        kept = [index for index, block in enumerate(self.blocks) if block in blocks]
        return Stacked(tuple(self.blocks[i] for i in kept), tuple(self.parts[i] for i in kept), self.total)

    @cached_property
    def pieces(self) -> tuple[tuple[Block | Tensor, Jacobian], ...]:
        """(indices, derivatives) of disjoint sets of weights; parts that share weights are merged."""
        groups: list[list[Block]] = []
        for block in dict.fromkeys(self.blocks):
            touching = [group for group in groups if any(block.overlaps(other) for other in group)]
            groups = [group for group in groups if group not in touching]
            groups.append([*(other for group in touching for other in group), block])
        pieces: list[tuple[Block | Tensor, Jacobian]] = []
        for blocks in groups:
            if len(blocks) == 1 and self.blocks.count(blocks[0]) == 1:
                pieces.append((blocks[0], self.parts[self.blocks.index(blocks[0])]))
            else:
                index: Tensor = torch.unique(torch.cat([block.index for block in blocks]))
                pieces.append((index, Selected(self.restricted(blocks), index)))
        return tuple(pieces)

    def squares(self) -> Tensor:
        total = torch.zeros(self.total, dtype=self.dtype, device=self.device)
        self.accumulate_squares(total)
        return total

    def summed(self) -> Tensor:
        total = torch.zeros(self.total, dtype=self.dtype, device=self.device)
        for block, part in zip(self.blocks, self.parts, strict=True):
            total.index_add_(0, block.index.to(total.device), part.summed())
        return total

    def gram(self, out: Tensor | None = None) -> Tensor:
        if len(self.parts) != 1 or not self.parts[0].closed:
            return super().gram(out)
        whole, index = self.parts[0].gram(), self.blocks[0].index.to(self.device)
        total = whole.new_zeros(self.total, self.total) if out is None else out
        total[index.unsqueeze(-1), index] += whole
        return total

    def accumulate_squares(self, total: Tensor) -> None:
        """Add `squares` to a vector (R,), piece by piece."""
        for where, piece in self.pieces:
            if isinstance(where, Block):
                piece.add_squares(where, total)
            else:
                total.index_add_(0, where.to(total.device), piece.squares())

    def weighted_gram(self, variance: Tensor) -> Tensor:
        return added(piece.weighted_gram(taken(variance, where)) for where, piece in self.pieces)

    def joint_gram(self, variance: Tensor) -> Tensor:
        return added(piece.joint_gram(taken(variance, where)) for where, piece in self.pieces)

    def weighted_squares(self, variance: Tensor) -> Tensor:
        return added(piece.weighted_squares(taken(variance, where)) for where, piece in self.pieces)

    def row_draws(self, variance: Tensor, noise: Tensor) -> Tensor | None:
        (where, piece), *others = self.pieces
        return None if others else piece.row_draws(taken(variance, where), noise)

    def products(self, vectors: Tensor) -> Tensor:
        pairs = zip(self.blocks, self.parts, strict=True)
        return added(part.products(block.gather(vectors)) for block, part in pairs)


def _double(value: Any) -> Any:
    """A factor in float64; tuples and Jacobians by their parts, anything else as it is."""
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, tuple):
        return tuple(_double(item) for item in value)
    if not isinstance(value, Jacobian):
        return value
    kind: Any = value  # a dataclass, as all kinds are
    return replace(kind, **{field.name: _double(getattr(kind, field.name)) for field in fields(kind)})


def added(values: Iterator[Tensor]) -> Tensor:
    """Sum of the values, made one at a time."""
    return reduce(torch.add, values)


def taken(vector: Tensor, where: Block | Tensor) -> Tensor:
    """The entries (..., size) of a vector (..., R) in a block or at indices."""
    return where.gather(vector) if isinstance(where, Block) else vector[..., where.to(vector.device)]
