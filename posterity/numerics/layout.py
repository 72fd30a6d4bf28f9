"""How named tensors lie in one flat vector."""

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
        pieces = []
        for part in self.slices:
            tensor = tensors[part.name]
            lead = tensor.shape[: tensor.dim() - len(part.shape)]
            pieces.append(tensor.reshape(*lead, part.size))
        return torch.cat(pieces, dim=-1)

    def matching(self, pattern: str) -> tuple[Slice, ...]:
        """The slices whose name matches a shell pattern such as `head.*`."""
        return tuple(part for part in self.slices if fnmatch.fnmatchcase(part.name, pattern))

    def name_at(self, index: int) -> str:
        """Name of the tensor that holds flat entry `index`."""
        for part in self.slices:
            if part.offset <= index < part.offset + part.size:
                return part.name
        raise IndexError(f"Layout has {self.size} entries. Got index {index}.")
