"""Precision matrices made of parts: one per block of weights, or one per member."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from posterity.jacobians.jacobian import Explicit, Jacobian, Selected, Stacked, added
from posterity.numerics.layout import Block
from posterity.precisions.precision import Precision, check_size


@dataclass(frozen=True, eq=False)
class BlockDiagonal(Precision):
    """A block-diagonal Lambda: parts[b] over the weights of blocks[b], which partition the `total` R weights.

    >>> from posterity.precisions.diagonal import Diagonal
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
        return self.total

    @property
    def logdet(self) -> Tensor:
        return torch.stack([part.logdet for part in self.parts]).sum(0)

    def rescaled(self, scale: Tensor | float, prior: Tensor) -> "BlockDiagonal":
        check_size("BlockDiagonal.prior", prior, self.total)
        pairs = zip(self.blocks, self.parts, strict=True)
        return self._with(tuple(part.rescaled(scale, block.gather(prior)) for block, part in pairs))

    def diagonal(self) -> Tensor:
        return self._joined(lambda _, part: part.diagonal())

    def matvec(self, vector: Tensor) -> Tensor:
        return self._joined(lambda block, part: part.matvec(block.gather(vector)))

    def solve(self, vector: Tensor) -> Tensor:
        return self._joined(lambda block, part: part.solve(block.gather(vector)))

    def colour(self, noise: Tensor) -> Tensor:
        return self._joined(lambda block, part: part.colour(block.gather(noise)))

    def variance(self) -> Tensor:
        return self._joined(lambda _, part: part.variance())

    def covariance(self) -> Tensor:
        values = [part.covariance() for part in self.parts]
        dense = values[0].new_zeros(*values[0].shape[:-2], self.total, self.total)
        for block, value in zip(self.blocks, values, strict=True):
            index = block.index.to(dense.device)
            dense[..., index.unsqueeze(-1), index] = value
        return dense

    def quadratic(self, jacobian: Tensor | Jacobian) -> Tensor:
        return added(part.quadratic(columns) for part, columns in self._pairs(jacobian))

    def joint_quadratic(self, jacobian: Tensor | Jacobian) -> Tensor:
        return added(part.joint_quadratic(columns) for part, columns in self._pairs(jacobian))

    def marginal(self, jacobian: Tensor | Jacobian) -> Tensor:
        return added(part.marginal(columns) for part, columns in self._pairs(jacobian))

    def row_draws(self, jacobian: Jacobian, noise: Tensor) -> Tensor | None:
        columns = _columns(jacobian, self.blocks[0])
        return (
            self.parts[0].row_draws(columns, noise) if len(self.parts) == 1 and isinstance(columns, Jacobian) else None
        )

    def member(self, index: int) -> "BlockDiagonal":
        return self._with(tuple(part.member(index) for part in self.parts))

    @property
    def base(self) -> Tensor:
        return self._joined(lambda _, part: part.base)

    def _sum(self, other: Precision, scale: Tensor | float) -> "BlockDiagonal | None":
        if not isinstance(other, BlockDiagonal) or self.blocks != other.blocks:
            return None
        return self._with(tuple(a.plus(b, scale) for a, b in zip(self.parts, other.parts, strict=True)))

    @property
    def _kind(self) -> str:
        return f"{len(self.parts)} blocks of {', '.join(sorted({type(part).__name__ for part in self.parts}))}"

    def _pairs(self, jacobian: Tensor | Jacobian) -> Iterator[tuple[Precision, Tensor | Jacobian]]:
        """Each part with its columns of J."""
        return ((part, _columns(jacobian, block)) for block, part in zip(self.blocks, self.parts, strict=True))

    def _with(self, parts: tuple[Precision, ...]) -> "BlockDiagonal":
        return BlockDiagonal(self.blocks, parts, self.total)

    def _joined(self, function: Callable[[Block, Precision], Tensor]) -> Tensor:
        """Values (..., size) of each part, scattered to (..., R)."""
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
    index = torch.cat([block.index for block in blocks]) if blocks else torch.zeros(0, dtype=torch.int64)
    outside = index.numel() and not 0 <= int(index.min()) <= int(index.max()) < total
    if outside or not bool((torch.bincount(index, minlength=total) == 1).all()) or not blocks:
        raise ValueError(
            f"BlockDiagonal.blocks must hold each of the {total} weights once. Got {len(blocks)} blocks of "
            f"{index.numel()} weights in all. Give each weight to one block, tied weights to the first that has them."
        )


@dataclass(frozen=True, eq=False)
class PerMember(Precision):
    """M precision matrices of any structure, with a leading member axis.

    >>> from posterity.precisions.diagonal import Diagonal
    >>> PerMember((Diagonal(torch.ones(2)), Diagonal(torch.full((2,), 4.0)))).variance()
    tensor([[1.0000, 1.0000],
            [0.2500, 0.2500]], dtype=torch.float64)
    """

    parts: tuple[Precision, ...]

    @property
    def size(self) -> int:
        return self.parts[0].size

    @property
    def logdet(self) -> Tensor:
        return torch.stack([part.logdet for part in self.parts])

    def rescaled(self, scale: Tensor | float, prior: Tensor) -> "PerMember":
        """Rescale each member, with its own scale where they are (M,), and its own prior where they are (M, R)."""
        scales = scale if isinstance(scale, Tensor) and scale.dim() else [scale] * len(self.parts)
        priors = prior if prior.dim() > 1 else [prior] * len(self.parts)
        return PerMember(tuple(p.rescaled(s, d) for p, s, d in zip(self.parts, scales, priors, strict=True)))

    def diagonal(self) -> Tensor:
        return self._stacked(lambda part: part.diagonal())

    def matvec(self, vector: Tensor) -> Tensor:
        return self._each(Precision.matvec.__name__, vector)

    def solve(self, vector: Tensor) -> Tensor:
        return self._each(Precision.solve.__name__, vector)

    def colour(self, noise: Tensor) -> Tensor:
        return self._each(Precision.colour.__name__, noise)

    def _each(self, name: str, values: Tensor) -> Tensor:
        rows = values.expand(len(self.parts), *values.shape[-1:]) if values.dim() == 1 else values
        return torch.stack([getattr(part, name)(row) for part, row in zip(self.parts, rows, strict=True)])

    def variance(self) -> Tensor:
        return self._stacked(lambda part: part.variance())

    def covariance(self) -> Tensor:
        return self._stacked(lambda part: part.covariance())

    def quadratic(self, jacobian: Tensor | Jacobian) -> Tensor:
        return self._stacked(lambda part: part.quadratic(jacobian))

    def marginal(self, jacobian: Tensor | Jacobian) -> Tensor:
        return self._stacked(lambda part: part.marginal(jacobian))

    def joint_quadratic(self, jacobian: Tensor | Jacobian) -> Tensor:
        return self._stacked(lambda part: part.joint_quadratic(jacobian))

    def _stacked(self, function: Callable[[Precision], Tensor]) -> Tensor:
        return torch.stack([function(part) for part in self.parts])

    def member(self, index: int) -> Precision:
        return self.parts[index]

    @property
    def base(self) -> Tensor:
        return self._stacked(lambda part: part.base)

    def plus(self, other: Precision, scale: Tensor | float = 1.0) -> Precision:
        others = other.parts if isinstance(other, PerMember) else (other,) * len(self.parts)
        return PerMember(tuple(part.plus(second, scale) for part, second in zip(self.parts, others, strict=True)))

    def _added_to(self, first: Precision, scale: Tensor | float) -> Precision:
        return PerMember(tuple(first.plus(part, scale) for part in self.parts))
