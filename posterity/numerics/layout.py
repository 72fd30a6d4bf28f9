"""Positions of tensors in a flat vector of weights: layouts of networks, blocks of layers."""

import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Slice:
    """One named tensor inside the flat vector: entries `offset` to `offset + size`, row-major."""

    name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def size(self) -> int:
        """Number of entries."""
        return prod(self.shape)


@dataclass(frozen=True)
class Layout:
    """The slices of a flat vector, in order and without gaps.

    >>> layout = Layout.of({"weight": (2, 3), "bias": (2,)})
    >>> layout.size, layout.names
    (8, ('weight', 'bias'))
    >>> layout.unflatten(torch.arange(8.0))["bias"]
    tensor([6., 7.])
    """

    slices: tuple[Slice, ...]

    @classmethod
    def of(cls, shapes: Mapping[str, Sequence[int]]) -> "Layout":
        """The layout of tensors of these shapes, in the mapping's order."""
        slices, offset = [], 0
        for name, shape in shapes.items():
            slices.append(Slice(name, tuple(shape), offset))
            offset += slices[-1].size
        return cls(tuple(slices))

    @cached_property
    def size(self) -> int:
        """Length P of the flat vector."""
        return sum(self._sizes)

    @cached_property
    def _sizes(self) -> list[int]:
        return [part.size for part in self.slices]

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names in order."""
        return tuple(part.name for part in self.slices)

    def __iter__(self) -> Iterator[Slice]:
        return iter(self.slices)

    def views(self, theta: Tensor) -> list[Tensor]:
        """Views of theta (..., P), one (..., *shape) for each slice, in order."""
        lead = tuple(theta.shape[:-1])
        pieces = torch.split_with_sizes(theta, self._sizes, -1)
        return [piece.view(lead + part.shape) for part, piece in zip(self.slices, pieces, strict=True)]

    def unflatten(self, theta: Tensor) -> dict[str, Tensor]:
        """The views of theta (..., P) by name."""
        return dict(zip(self.names, self.views(theta), strict=True))

    def flatten(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The flat vector (..., P) of named tensors (..., *shape)."""
        pairs = [(tensors[part.name], part) for part in self.slices]
        return torch.cat([t.reshape(*t.shape[: t.dim() - len(part.shape)], part.size) for t, part in pairs], dim=-1)

    def matching(self, pattern: str) -> tuple[Slice, ...]:
        """The slices whose name matches a shell pattern such as `head.*`."""
        return tuple(part for part in self.slices if fnmatch.fnmatchcase(part.name, pattern))

    def name_at(self, index: int) -> str:
        """Name of the tensor that holds flat entry `index`."""
        for part in self.slices:
            if part.offset <= index < part.offset + part.size:
                return part.name
        raise IndexError(f"Layout has {self.size} entries. Got index {index}.")


@dataclass(frozen=True)
class Block:
    """A matrix of weights (rows, columns) inside a flat vector of R weights, with any bias as a further column.

    `weight` and `bias` are the offsets of the two tensors in the vector, None for an absent tensor. The entries of the
    block are row-major, the bias entry of a row after its weights; with `transposed` the weights lie in the vector as
    (columns, rows).

    >>> block = Block(("weight", "bias"), rows=2, columns=2, weight=1, bias=5)
    >>> block.gather(torch.arange(7.0))
    tensor([1., 2., 5., 3., 4., 6.])
    """

    names: tuple[str, ...]
    rows: int
    columns: int
    weight: int | None
    bias: int | None = None
    transposed: bool = False

    @property
    def width(self) -> int:
        """Number of columns, with the bias."""
        return (0 if self.weight is None else self.columns) + (0 if self.bias is None else 1)

    @property
    def size(self) -> int:
        """Number of weights in the block."""
        return self.rows * self.width

    def gather(self, vector: Tensor) -> Tensor:
        """The block's entries (..., size) of a vector (..., R)."""
        if vector.stride(-1) == 0:  # an expanded number stays expanded
            return vector[..., :1].expand(*vector.shape[:-1], self.size)
        parts = self.views(vector)
        return (parts[0] if len(parts) == 1 else torch.cat(parts, -1)).flatten(-2)

    def scatter(self, entries: Tensor, vector: Tensor) -> None:
        """Write the block's entries (..., size) to their positions in a vector (..., R)."""
        for view, part in self._pairs(entries, vector):
            view.copy_(part)

    def add(self, entries: Tensor, vector: Tensor) -> None:
        """Add the block's entries (..., size) at their positions in a vector (..., R)."""
        for view, part in self._pairs(entries, vector):
            view.add_(part)

    def views(self, vector: Tensor) -> list[Tensor]:
        """Views of a vector (..., R): of the weights (..., rows, columns), and of the bias (..., rows, 1), if in it."""
        return [self._view(vector, offset, width) for offset, width in self._parts()]

    def _pairs(self, entries: Tensor, vector: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        entries = entries.reshape(*entries.shape[:-1], self.rows, self.width)
        first = 0
        for offset, width in self._parts():  # each view made when it is used: a write through one changes the graph
            yield self._view(vector, offset, width), entries[..., first : first + width]
            first += width

    @property
    def index(self) -> Tensor:
        """Positions (size,) of the block's entries in the vector, on the CPU."""
        size = max(offset + self.rows * width for offset, width in self._parts())
        return torch.cat(self.views(torch.arange(size, device="cpu")), -1).flatten()

    def overlaps(self, other: "Block") -> bool:
        """Whether the two blocks share an entry of the vector."""
        if set(self.names).isdisjoint(other.names):
            return False
        spans = [[(low, low + block.rows * width) for low, width in block._parts()] for block in (self, other)]
        return any(low < end and first < high for low, high in spans[0] for first, end in spans[1])

    def _parts(self) -> list[tuple[int, int]]:
        parts = [] if self.weight is None else [(self.weight, self.columns)]
        return parts if self.bias is None else [*parts, (self.bias, 1)]

    def _view(self, vector: Tensor, offset: int, width: int) -> Tensor:
        part = vector.narrow(-1, offset, self.rows * width)
        if self.transposed:
            return part.view(*vector.shape[:-1], width, self.rows).mT
        return part.view(*vector.shape[:-1], self.rows, width)
