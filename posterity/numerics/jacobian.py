"""Derivatives of N rows of D outputs in R weights, held in factors: the dense (N, D, R) is never needed whole."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from posterity.numerics.block import Block

CHUNK = 1 << 24  # entries of dense rows that are formed at a time


class Jacobian(ABC):
    """J (N, D, R), row n and output d by weight r."""

    @property
    @abstractmethod
    def num_rows(self) -> int:
        """N."""

    @property
    @abstractmethod
    def num_outputs(self) -> int:
        """D."""

    @property
    @abstractmethod
    def size(self) -> int:
        """R."""

    @abstractmethod
    def rows(self) -> Tensor:
        """J, dense (N, D, R)."""

    @abstractmethod
    def narrow(self, low: int, high: int) -> "Jacobian":
        """The rows `low` to `high`."""

    def chunks(self) -> Iterator[tuple[int, "Jacobian"]]:
        """(first row, rows) in pieces whose dense form is of bounded size."""
        step = max(1, CHUNK // max(1, self.num_outputs * self.size))
        for low in range(0, self.num_rows, step):
            yield low, self.narrow(low, min(self.num_rows, low + step))

    def squares(self) -> Tensor:
        """Sum of J^2 over rows and outputs, (R,)."""
        total = None
        for _, part in self.chunks():
            rows = part.rows().flatten(0, 1)
            value = torch.einsum("nr,nr->r", rows, rows)
            total = value if total is None else total + value
        assert total is not None
        return total

    def weighted_gram(self, variance: Tensor) -> Tensor:
        """J diag(variance) J^T for each row, (N, D, D), of variances (R,)."""
        root = variance.sqrt()
        parts = []
        for _, part in self.chunks():
            scaled = part.rows() * root.to(part.dtype)
            parts.append(scaled @ scaled.mT)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Number type of the factors."""


@dataclass(frozen=True, eq=False)
class Explicit(Jacobian):
    """J given as it is, (N, D, R).

    >>> Explicit(torch.ones(2, 1, 3)).squares()
    tensor([2., 2., 2.])
    """

    dense: Tensor

    @property
    def num_rows(self) -> int:
        """N."""
        return self.dense.shape[0]

    @property
    def num_outputs(self) -> int:
        """D."""
        return self.dense.shape[1]

    @property
    def size(self) -> int:
        """R."""
        return self.dense.shape[2]

    @property
    def dtype(self) -> torch.dtype:
        """That of the tensor."""
        return self.dense.dtype

    def rows(self) -> Tensor:
        """The tensor."""
        return self.dense

    def narrow(self, low: int, high: int) -> "Explicit":
        """Those rows."""
        return Explicit(self.dense[low:high])


@dataclass(frozen=True, eq=False)
class Matrix(Jacobian):
    """Derivatives in weights that act as matrices: z_t = W a_t + b at T positions of each row, in G groups.

    J[n, d, (g, o, i)] = sum_t gradients[d, n, t, g, o] features[n, t, g, i], with a last i of feature 1 for the bias.
    `features` (N, T, G, I) has no such column; it is None where only the bias is wanted. Convolutions have T output
    positions and the patches below them as features.

    >>> part = Matrix(torch.ones(1, 1, 1, 2), torch.full((1, 1, 1, 1, 1), 3.0), bias=True)
    >>> part.rows()
    tensor([[[3., 3., 3.]]])
    """

    features: Tensor | None
    gradients: Tensor
    bias: bool

    @property
    def num_rows(self) -> int:
        """N."""
        return self.gradients.shape[1]

    @property
    def num_outputs(self) -> int:
        """D."""
        return self.gradients.shape[0]

    @property
    def positions(self) -> int:
        """T."""
        return self.gradients.shape[2]

    @property
    def width(self) -> int:
        """Features with the 1 of the bias."""
        return (0 if self.features is None else self.features.shape[3]) + int(self.bias)

    @property
    def size(self) -> int:
        """G O I, the bias counted in I."""
        return self.gradients.shape[3] * self.gradients.shape[4] * self.width

    @property
    def dtype(self) -> torch.dtype:
        """That of the gradients."""
        return self.gradients.dtype

    @cached_property
    def inputs(self) -> Tensor:
        """Features with the 1 of the bias, (N, T, G, I)."""
        if self.features is not None and not self.bias:
            return self.features
        ones = self.gradients.new_ones(*self.gradients.shape[1:4], 1)
        return ones if self.features is None else torch.cat([self.features, ones], -1)

    def rows(self) -> Tensor:
        """Sum over positions of the outer products."""
        if self.positions == 1:
            outer = self.gradients[:, :, 0, :, :, None] * self.inputs[:, 0, :, None, :]  # (D, N, G, O, I)
        else:
            left = self.gradients.permute(0, 1, 3, 4, 2)  # (D, N, G, O, T)
            outer = left @ self.inputs.permute(0, 2, 1, 3)  # times (N, G, T, I)
        return outer.flatten(2).transpose(0, 1)

    def narrow(self, low: int, high: int) -> "Matrix":
        """Those rows."""
        features = None if self.features is None else self.features[low:high]
        return Matrix(features, self.gradients[:, low:high], self.bias)

    def rotated(self, outer: Tensor, inner: Tensor) -> "Matrix":
        """J in the coordinates W -> outer^T W inner, for outer (G, O, O) and inner (G, I, I), the bias in I."""
        gradients = torch.einsum("dntgo,gop->dntgp", self.gradients, outer.to(self.dtype))
        features = torch.einsum("ntgi,gij->ntgj", self.inputs, inner.to(self.dtype))
        return Matrix(features, gradients, bias=False)

    def squares(self) -> Tensor:
        """Where each row has one position, a product of the squares of the factors."""
        if self.positions > 1:
            return super().squares()
        outer = self.gradients[:, :, 0].square().sum(0)  # (N, G, O)
        inner = self.inputs[:, 0].square()  # (N, G, I)
        if outer.shape[1] == 1:
            return (outer[:, 0].T @ inner[:, 0]).flatten()
        return torch.einsum("ngo,ngi->goi", outer, inner).flatten()

    def weighted_gram(self, variance: Tensor) -> Tensor:
        """Where each row has one position: U diag(inner^2 variance) U^T with U the gradients."""
        if self.positions > 1:
            return super().weighted_gram(variance)
        _, _, _, groups, out = self.gradients.shape
        inner = self.inputs[:, 0].square()  # (N, G, I)
        table = variance.to(self.dtype).view(groups, out, -1)  # (G, O, I)
        if groups == 1:
            weights = inner[:, 0] @ table[0].T  # (N, O)
        else:
            weights = torch.einsum("ngi,goi->ngo", inner, table).flatten(1)
        half = self.gradients[:, :, 0].flatten(2).transpose(0, 1)  # (N, D, G O)
        return (half * weights.unsqueeze(1)) @ half.mT


@dataclass(frozen=True, eq=False)
class Lookup(Jacobian):
    """Derivatives in the rows of a table (V, E) that are looked up at T positions: an embedding.

    J[n, d, (v, e)] = sum over t with index[n, t] = v of gradients[d, n, t, e].

    >>> part = Lookup(torch.tensor([[2, 2]]), torch.ones(1, 1, 2, 1), entries=3)
    >>> part.rows()
    tensor([[[0., 0., 2.]]])
    """

    index: Tensor  # (N, T)
    gradients: Tensor  # (D, N, T, E)
    entries: int

    @property
    def num_rows(self) -> int:
        """N."""
        return self.index.shape[0]

    @property
    def num_outputs(self) -> int:
        """D."""
        return self.gradients.shape[0]

    @property
    def size(self) -> int:
        """V E."""
        return self.entries * self.gradients.shape[-1]

    @property
    def dtype(self) -> torch.dtype:
        """That of the gradients."""
        return self.gradients.dtype

    @cached_property
    def merged(self) -> Tensor:
        """Gradients (D, N, T, E) in which the first position of each entry of a row has the sum of all its positions."""
        same = self.index.unsqueeze(1) == self.index.unsqueeze(2)  # (N, T, T)
        first = same.to(torch.int8).argmax(-1) == torch.arange(self.index.shape[1], device=self.index.device)
        return (same & first.unsqueeze(-1)).to(self.dtype) @ self.gradients

    def rows(self) -> Tensor:
        """The gradients, added at their places."""
        outputs, num, positions, width = self.gradients.shape
        dense = self.gradients.new_zeros(num, outputs, self.entries, width)
        place = self.index[:, None, :, None].expand(num, outputs, positions, width)
        return dense.scatter_add(2, place, self.gradients.transpose(0, 1)).flatten(2)

    def narrow(self, low: int, high: int) -> "Lookup":
        """Those rows."""
        return Lookup(self.index[low:high], self.gradients[:, low:high], self.entries)

    def rotated(self, inner: Tensor) -> "Lookup":
        """J in the coordinates table -> table inner, for inner (E, E)."""
        return Lookup(self.index, self.gradients @ inner.to(self.dtype), self.entries)

    def squares(self) -> Tensor:
        """Squares of the merged gradients, added at their places."""
        values = self.merged.square().sum(0).flatten(0, 1)  # (N T, E)
        return values.new_zeros(self.entries, values.shape[-1]).index_add(0, self.index.flatten(), values).flatten()

    def weighted_gram(self, variance: Tensor) -> Tensor:
        """Over the merged gradients, which share no entry."""
        table = variance.to(self.dtype).view(self.entries, -1)[self.index]  # (N, T, E)
        half = self.merged.transpose(0, 1)  # (N, D, T, E)
        return (half * table.unsqueeze(1)).flatten(2) @ half.flatten(2).mT


@dataclass(frozen=True, eq=False)
class Stacked(Jacobian):
    """J over all R weights, made of parts that each concern one block; blocks of tied weights may overlap.

    >>> block = Block(("bias",), rows=2, columns=1, weight=1)
    >>> Stacked((block,), (Explicit(torch.ones(1, 1, 2)),), 4).rows()
    tensor([[[0., 1., 1., 0.]]])
    """

    blocks: tuple[Block, ...]
    parts: tuple[Jacobian, ...]
    total: int

    @property
    def num_rows(self) -> int:
        """N."""
        return self.parts[0].num_rows

    @property
    def num_outputs(self) -> int:
        """D."""
        return self.parts[0].num_outputs

    @property
    def size(self) -> int:
        """R."""
        return self.total

    @property
    def dtype(self) -> torch.dtype:
        """That of the parts."""
        return self.parts[0].dtype

    def rows(self) -> Tensor:
        """The parts, added at their places."""
        first = self.parts[0]
        dense = first.rows().new_zeros(self.num_rows, self.num_outputs, self.total)
        for block, part in zip(self.blocks, self.parts, strict=True):
            dense = dense.index_add(2, block.index.to(dense.device), part.rows())
        return dense

    def narrow(self, low: int, high: int) -> "Stacked":
        """Those rows."""
        return Stacked(self.blocks, tuple(part.narrow(low, high) for part in self.parts), self.total)

    def part(self, block: Block) -> Jacobian:
        """The derivatives in the weights of one block, in its order."""
        found = [part for other, part in zip(self.blocks, self.parts, strict=True) if other == block]
        touching = [other for other in self.blocks if not set(other.names).isdisjoint(block.names)]
        if len(found) == 1 and len(touching) == 1:
            return found[0]
        return Explicit(block.gather(self.restricted(touching).rows()))

    def restricted(self, blocks: list[Block]) -> "Stacked":
        """The parts of these blocks alone, the others zero."""
        pairs = [(block, part) for block, part in zip(self.blocks, self.parts, strict=True) if block in blocks]
        return Stacked(tuple(block for block, _ in pairs), tuple(part for _, part in pairs), self.total)

    @cached_property
    def separate(self) -> bool:
        """Whether no weight is in two parts."""
        names = [name for block in self.blocks for name in block.names]
        return len(set(names)) == len(names)

    def squares(self) -> Tensor:
        """Part by part where no weight is in two of them."""
        if not self.separate:
            return super().squares()
        total: Tensor | None = None
        for block, part in zip(self.blocks, self.parts, strict=True):
            values = part.squares()
            total = values.new_zeros(self.total) if total is None else total
            block.scatter(values, total)
        assert total is not None
        return total

    def weighted_gram(self, variance: Tensor) -> Tensor:
        """Part by part where no weight is in two of them."""
        if not self.separate:
            return super().weighted_gram(variance)
        total: Tensor | None = None
        for block, part in zip(self.blocks, self.parts, strict=True):
            value = part.weighted_gram(block.gather(variance))
            total = value if total is None else total + value
        assert total is not None
        return total


@dataclass(frozen=True, eq=False)
class Selected(Jacobian):
    """Some columns of another Jacobian: the weights at the places `index` (S,)."""

    whole: Jacobian
    index: Tensor

    @property
    def num_rows(self) -> int:
        """N."""
        return self.whole.num_rows

    @property
    def num_outputs(self) -> int:
        """D."""
        return self.whole.num_outputs

    @property
    def size(self) -> int:
        """S."""
        return self.index.numel()

    @property
    def dtype(self) -> torch.dtype:
        """That of the whole."""
        return self.whole.dtype

    def rows(self) -> Tensor:
        """The columns, from pieces of the whole of bounded size."""
        return torch.cat([part.rows()[..., self.index] for _, part in self.whole.chunks()])

    def narrow(self, low: int, high: int) -> "Selected":
        """Those rows."""
        return Selected(self.whole.narrow(low, high), self.index)
