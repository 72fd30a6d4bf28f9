"""Where the weights of one block lie in the vector of random weights."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Block:
    """A matrix of weights (rows, columns) inside a flat vector of R weights, with a bias as one more column if it has.

    `weight` and `bias` are the offsets of the two tensors in the vector, None for one that is not in it. Inside the
    block the entries are row-major, the bias entry of a row after its weights.

    >>> block = Block(("weight", "bias"), rows=2, columns=2, weight=1, bias=5)
    >>> block.gather(torch.arange(7.0))
    tensor([1., 2., 5., 3., 4., 6.])
    """

    names: tuple[str, ...]
    rows: int
    columns: int
    weight: int | None
    bias: int | None = None

    @property
    def width(self) -> int:
        """Columns with the bias."""
        return (0 if self.weight is None else self.columns) + (0 if self.bias is None else 1)

    @property
    def size(self) -> int:
        """How many weights the block has."""
        return self.rows * self.width

    def gather(self, vector: Tensor) -> Tensor:
        """The block's entries (..., size) of a vector (..., R)."""
        if vector.stride(-1) == 0:  # one number expanded stays one
            return vector[..., :1].expand(*vector.shape[:-1], self.size)
        parts = self.views(vector)
        return (parts[0] if len(parts) == 1 else torch.cat(parts, -1)).flatten(-2)

    def scatter(self, entries: Tensor, vector: Tensor) -> None:
        """Write the block's entries (..., size) into their places of a vector (..., R)."""
        for view, part in self._pairs(entries, vector):
            view.copy_(part)

    def add(self, entries: Tensor, vector: Tensor) -> None:
        """Add the block's entries (..., size) at their places of a vector (..., R)."""
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
        """Places (size,) of the block's entries in the vector."""
        parts = [
            torch.arange(offset, offset + self.rows * width).view(self.rows, width) for offset, width in self._parts()
        ]
        return torch.cat(parts, -1).flatten()

    def _parts(self) -> list[tuple[int, int]]:
        parts = [] if self.weight is None else [(self.weight, self.columns)]
        return parts if self.bias is None else [*parts, (self.bias, 1)]

    def _view(self, vector: Tensor, offset: int, width: int) -> Tensor:
        return vector.narrow(-1, offset, self.rows * width).view(*vector.shape[:-1], self.rows, width)
