"""Precision matrices without correlations between blocks of weights."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from posterity.numerics.block import Block
from posterity.numerics.jacobian import Explicit, Jacobian, Selected, Stacked, added
from posterity.numerics.precision import Precision
from posterity.numerics.spectrum import check_size


@dataclass(frozen=True, eq=False)
class BlockDiagonal(Precision):
    """Lambda with the matrix parts[b] over the weights of blocks[b]; the blocks share out the `total` R weights.

    >>> from posterity.numerics.diagonal import Diagonal
    >>> blocks = (Block(("w",), 1, 2, weight=1), Block(("b",), 1, 1, weight=0))
    >>> parts = (Diagonal(torch.tensor([2.0, 4.0])), Diagonal(torch.tensor([1.0])))
    >>> BlockDiagonal(blocks, parts, 3).variance()
    tensor([1.0000, 0.5000, 0.2500], dtype=torch.float64)
    """

    blocks: tuple[Block, ...]
    parts: tuple[Precision, ...]
    total: int

    def __post_init__(self) -> None:
        _check_partition(self.blocks, self.total)
        sizes, wanted = tuple(part.size for part in self.parts), tuple(block.size for block in self.blocks)
        if sizes != wanted:
            raise ValueError(f"BlockDiagonal.parts must have the sizes {wanted} of the blocks. Got {sizes}.")

    @property
    def size(self) -> int:
        """R."""
        return self.total

    @property
    def logdet(self) -> Tensor:
        """Sum over the parts."""
        return torch.stack([part.logdet for part in self.parts]).sum(0)

    def rescaled(self, scale: Tensor | float, prior: Tensor) -> "BlockDiagonal":
        """Part by part."""
        check_size("BlockDiagonal.prior", prior, self.total)
        pairs = zip(self.blocks, self.parts, strict=True)
        return self._with(tuple(part.rescaled(scale, block.gather(prior)) for block, part in pairs))

    def diagonal(self) -> Tensor:
        """Part by part."""
        return self._joined(lambda _, part: part.diagonal())

    def matvec(self, vector: Tensor) -> Tensor:
        """Part by part."""
        return self._joined(lambda block, part: part.matvec(block.gather(vector)))

    def solve(self, vector: Tensor) -> Tensor:
        """Part by part."""
        return self._joined(lambda block, part: part.solve(block.gather(vector)))

    def colour(self, noise: Tensor) -> Tensor:
        """Part by part."""
        return self._joined(lambda block, part: part.colour(block.gather(noise)))

    def variance(self) -> Tensor:
        """Part by part."""
        return self._joined(lambda _, part: part.variance())

    def covariance(self) -> Tensor:
        """The parts' covariances at their places."""
        values = [part.covariance() for part in self.parts]
        dense = values[0].new_zeros(*values[0].shape[:-2], self.total, self.total)
        for block, value in zip(self.blocks, values, strict=True):
            index = block.index.to(dense.device)
            dense[..., index.unsqueeze(-1), index] = value
        return dense

    def quadratic(self, jacobian: Tensor | Jacobian) -> Tensor:
        """Sum over the parts."""
        pairs = zip(self.blocks, self.parts, strict=True)
        return added(part.quadratic(_columns(jacobian, block)) for block, part in pairs)

    def joint_quadratic(self, jacobian: Tensor | Jacobian) -> Tensor:
        """Sum over the parts."""
        pairs = zip(self.blocks, self.parts, strict=True)
        return added(part.joint_quadratic(_columns(jacobian, block)) for block, part in pairs)

    def marginal(self, jacobian: Tensor | Jacobian) -> Tensor:
        """Sum over the parts."""
        pairs = zip(self.blocks, self.parts, strict=True)
        return added(part.marginal(_columns(jacobian, block)) for block, part in pairs)

    def member(self, index: int) -> "BlockDiagonal":
        """One member's parts."""
        return self._with(tuple(part.member(index) for part in self.parts))

    def _with(self, parts: tuple[Precision, ...]) -> "BlockDiagonal":
        return BlockDiagonal(self.blocks, parts, self.total)

    def _joined(self, function: Callable[[Block, Precision], Tensor]) -> Tensor:
        """Values (..., size) of each part at their places, (..., R)."""
        values = [function(block, part) for block, part in zip(self.blocks, self.parts, strict=True)]
        whole = values[0].new_empty(*values[0].shape[:-1], self.total)
        for block, value in zip(self.blocks, values, strict=True):
            block.scatter(value, whole)
        return whole


def _columns(jacobian: Tensor | Jacobian, block: Block) -> Tensor | Jacobian:
    """The derivatives in the weights of one block."""
    if isinstance(jacobian, Tensor):
        return block.gather(jacobian)
    if isinstance(jacobian, Stacked):
        return jacobian.part(block)
    if isinstance(jacobian, Explicit):
        return Explicit(block.gather(jacobian.dense))
    return Selected(jacobian, block.index)


@lru_cache(maxsize=32)
def _check_partition(blocks: tuple[Block, ...], total: int) -> None:
    """Refuse blocks that do not hold each of the weights once."""
    places = torch.cat([block.index for block in blocks]) if blocks else torch.zeros(0, dtype=torch.int64)
    outside = places.numel() and not 0 <= int(places.min()) <= int(places.max()) < total
    if outside or not bool((torch.bincount(places, minlength=total) == 1).all()) or not blocks:
        raise ValueError(
            f"BlockDiagonal.blocks must hold each of the {total} weights once. Got {len(blocks)} blocks of "
            f"{places.numel()} weights in all. Give each weight to one block, tied weights to the first that has them."
        )
