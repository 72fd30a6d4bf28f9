"""Jacobians of linear layers, embeddings and norms in factors."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from posterity.jacobians import jacobian
from posterity.jacobians.jacobian import Jacobian, Outline
from posterity.numerics.layout import Block

BLOCKS = 4
LEAST = 256  # columns below which a single product is faster


def upper_gram(matrix: Tensor, out: Tensor | None = None) -> Tensor:
    """Add the upper triangle of X^T X for X (n, d) to `out`; entries below the diagonal are undefined.

    Takes (BLOCKS + 1) / (2 BLOCKS) of the multiplications; `symmetric` fills in the lower triangle.

    >>> import torch
    >>> symmetric(upper_gram(torch.tensor([[1.0, 2.0]])))
    tensor([[1., 2.],
            [2., 4.]])
    """
    size = matrix.shape[1]
    out = matrix.new_zeros(size, size) if out is None else out
    blocks = BLOCKS if size >= LEAST else 1
    width = -(-size // blocks)
    for low in range(0, size, width):
        high = min(size, low + width)
        out[low:high, low:].addmm_(matrix[:, low:high].T, matrix[:, low:])
    return out


def symmetric(upper: Tensor) -> Tensor:
    """Symmetric matrices (..., d, d) from their upper triangles."""
    return upper.triu() + upper.triu(1).mT


@dataclass(frozen=True, eq=False)
class Matrix(Jacobian):
    """Derivatives in W and b of layers z_t = W a_t + b, at T positions of each row and in G groups.

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

    @classmethod
    def at_positions(cls, parts: Sequence["Matrix"]) -> "Matrix":
        """Layers of the same weights, at the positions of all of them."""
        features = [part.features for part in parts if part.features is not None]
        gradients = torch.cat([part.gradients for part in parts], 2)
        return cls(torch.cat(features, 1) if features else None, gradients, parts[0].bias)

    @property
    def outline(self) -> Outline:
        outputs, rows, _, groups, out = self.gradients.shape
        return Outline.like(self.gradients, rows, outputs, groups * out * self.width)

    @property
    def positions(self) -> int:
        """T."""
        return self.gradients.shape[2]

    @property
    def width(self) -> int:
        """Number of features, the 1 of the bias included."""
        return (0 if self.features is None else self.features.shape[3]) + int(self.bias)

    @cached_property
    def inputs(self) -> Tensor:
        """Features, with a last 1 for the bias, (N, T, G, I)."""
        if self.features is not None and not self.bias:
            return self.features
        ones = self.gradients.new_ones(*self.gradients.shape[1:4], 1)
        return ones if self.features is None else torch.cat([self.features, ones], -1)

    def rows(self) -> Tensor:
        if self.positions == 1:
            outer = self.gradients[:, :, 0, :, :, None] * self.inputs[:, 0, :, None, :]  # (D, N, G, O, I)
        else:
            left = self.gradients.permute(1, 3, 0, 4, 2)  # (N, G, D, O, T)
            outer = left.flatten(2, 3) @ self.inputs.permute(0, 2, 1, 3)  # times (N, G, T, I)
            outer = outer.view(*outer.shape[:2], *left.shape[2:4], -1).permute(2, 0, 1, 3, 4)
        return outer.flatten(2).transpose(0, 1)

    def summed(self) -> Tensor:
        gradients = self.gradients.sum(0).flatten(0, 1)  # (N T, G, O)
        return torch.einsum("mgo,mgi->goi", gradients, self.inputs.flatten(0, 1)).flatten()

    def narrow(self, low: int, high: int) -> "Matrix":
        features = None if self.features is None else self.features[low:high]
        return Matrix(features, self.gradients[:, low:high], self.bias)

    def inner_gram(self, weights: Tensor | None) -> Tensor:
        """Sum over rows, with `weights` (N,), of the mean over positions of a a^T: upper triangles (G, I, I)."""
        features, groups = self.features, self.gradients.shape[3]
        total = float(self.num_rows) if weights is None else float(weights.sum())
        if features is None:
            return self.gradients.new_full((groups, 1, 1), total)
        weighted = features if weights is None else features * weights.to(self.dtype).view(-1, 1, 1, 1)
        width = features.shape[-1]
        inner = features.new_zeros(groups, self.width, self.width)
        if groups == 1 and weights is None:
            upper_gram(features.flatten(2).flatten(0, 1), inner[0, :width, :width])
        else:
            inner[:, :width, :width] = torch.einsum("ntgi,ntgj->gij", features, weighted)
        if self.bias:
            inner[:, :-1, -1] = weighted.sum((0, 1))
            inner[:, -1, -1] = total * self.positions
        return inner if self.positions == 1 else inner.div_(self.positions)

    def outer_gram(self) -> Tensor:
        """Sum of g g^T over outputs, rows and positions: upper triangles (G, O, O)."""
        flat = self.gradients.transpose(0, 1).flatten(0, 2)  # (N D T, G, O)
        if flat.shape[1] == 1:
            return upper_gram(flat[:, 0]).unsqueeze(0)
        return torch.einsum("ngo,ngp->gop", flat, flat)

    def outer_squares(self) -> Tensor:
        """The diagonal of `outer_gram` of one group, (O,)."""
        return self.gradients.square().sum((0, 1, 2))[0]

    def rotated(self, outer: Tensor | None, inner: Tensor) -> "Matrix":
        """J in the coordinates outer^T W inner, for outer (G, O, O), None the identity, and inner (G, I, I).

        The bias is in I.
        """
        gradients = self.gradients
        if outer is not None:
            gradients = torch.einsum("dntgo,gop->dntgp", gradients, outer.to(self.dtype))
        return Matrix(torch.einsum("ntgi,gij->ntgj", self.inputs, inner.to(self.dtype)), gradients, bias=False)

    def squares(self) -> Tensor:
        if self.positions > 1:
            return super().squares()
        outer = self.gradients.new_zeros(self.gradients.shape[1], *self.gradients.shape[3:])  # (N, G, O)
        for column in self.gradients[:, :, 0]:  # a single column fits in the cache
            outer.addcmul_(column, column)
        inner = self.inputs[:, 0].square()  # (N, G, I): with one position, J^2 is a product of squared factors
        if outer.shape[1] == 1:
            return (outer[:, 0].T @ inner[:, 0]).flatten()
        return torch.einsum("ngo,ngi->goi", outer, inner).flatten()

    def weighted_gram(self, variance: Tensor) -> Tensor:
        """With one position per row, U diag(inner^2 variance) U^T with U the gradients."""
        if self.positions > 1:
            return super().weighted_gram(variance)
        half = self.gradients[:, :, 0].flatten(2).transpose(0, 1)  # (N, D, G O)
        return (half * self._inside(variance).unsqueeze(1)) @ half.mT

    def weighted_squares(self, variance: Tensor) -> Tensor:
        """With one position per row, U^2 (inner^2 variance) with U the gradients."""
        if self.positions > 1:
            return super().weighted_squares(variance)
        half = self.gradients[:, :, 0].flatten(2).transpose(0, 1)  # (N, D, G O)
        value: Tensor = torch.linalg.vecdot(half.square(), self._inside(variance).unsqueeze(1))
        return value

    def _inside(self, variance: Tensor) -> Tensor:
        """inner^2 variance, (N, G O), for one position."""
        table = variance.to(self.dtype).view(*self.gradients.shape[3:], -1)  # (G, O, I)
        return torch.einsum("ngi,goi->ngo", self.inputs[:, 0].square(), table).flatten(1)

    def products(self, vectors: Tensor) -> Tensor:
        """sum_t gradients_t . (W a_t) for each matrix W, unless many positions make the dense form cheaper."""
        draws = len(vectors)
        if draws * self.positions > self.num_outputs * (self.positions + draws):
            return super().products(vectors)
        table = vectors.to(self.dtype).view(draws, *self.gradients.shape[3:], -1)  # (S, G, O, I)
        inner = self.inputs.permute(2, 0, 1, 3).flatten(1, 2)  # (G, N T, I)
        outer = self.gradients.transpose(0, 1).flatten(2)  # (N, D, T G O)
        step = max(1, jacobian.chunk_size(self.device) // max(1, self.gradients[0].numel()))
        parts = []
        for low in range(0, draws, step):
            moved = inner @ table[low : low + step].mT  # (s, G, N T, O)
            moved = moved.reshape(*moved.shape[:2], self.num_rows, -1, moved.shape[-1])  # (s, G, N, T, O)
            moved = moved.permute(2, 3, 1, 4, 0).flatten(1, 3)  # (N, T G O, s)
            parts.append((outer @ moved).permute(2, 0, 1))
        return torch.cat(parts)

    def joint_gram(self, variance: Tensor) -> Tensor:
        """With one position per row, U diag(inner inner' variance) U'^T for each pair of rows.

        Otherwise in chunks of rows of the weight matrix, so that the dense form is of bounded size.
        """
        _, _, _, groups, out = self.gradients.shape
        table = variance.to(self.dtype).view(groups, out, -1)
        count = self.num_rows * self.num_outputs
        total = self.gradients.new_zeros(count, count)
        gram = self._pairs if self.positions == 1 else self._sums
        for group in range(groups):
            total = total + gram(group, table[group])
        return total

    def _pairs(self, group: int, table: Tensor) -> Tensor:
        """The Gram matrix of one group with variances (O, I), for one position."""
        inner, outer = self.inputs[:, 0, group], self.gradients[:, :, 0, group].transpose(0, 1)  # (N, I), (N, D, O)
        num, outputs, out = outer.shape
        step = max(1, jacobian.chunk_size(self.device) // max(1, num * (inner.shape[-1] + outputs * out)))
        parts = []
        for low in range(0, num, step):
            weights = (inner[low : low + step, None] * inner) @ table.T  # (n, N, O)
            left = outer[low : low + step, None] * weights.unsqueeze(2)  # (n, N, D, O)
            parts.append((left @ outer.mT).transpose(1, 2).flatten(2).flatten(0, 1))  # (n D, N D)
        whole = torch.cat(parts)
        return 0.5 * (whole + whole.mT)

    def _sums(self, group: int, table: Tensor) -> Tensor:
        """The Gram matrix of one group with variances (O, I), for any number of positions."""
        features = None if self.features is None else self.features[:, :, group : group + 1]
        count = self.num_rows * self.num_outputs
        step = max(1, jacobian.chunk_size(self.device) // max(1, count * self.width))
        total = self.gradients.new_zeros(count, count)
        for low in range(0, table.shape[0], step):
            part = Matrix(features, self.gradients[:, :, :, group : group + 1, low : low + step], self.bias)
            scaled = (part.rows() * table[low : low + step].flatten().sqrt()).flatten(0, 1)
            total = total + scaled @ scaled.mT
        return total


@dataclass(frozen=True, eq=False)
class Lookup(Jacobian):
    """Derivatives in an embedding table (V, E) whose rows are looked up at T positions.

    J[n, d, (v, e)] = sum over t with index[n, t] = v of gradients[d, n, t, e].

    >>> part = Lookup(torch.tensor([[2, 2]]), torch.ones(1, 1, 2, 1), entries=3)
    >>> part.rows()
    tensor([[[0., 0., 2.]]])
    """

    index: Tensor  # (N, T)
    gradients: Tensor  # (D, N, T, E)
    entries: int
    padding: int | None = None  # an entry that is not learnt: its gradients are zero

    @property
    def outline(self) -> Outline:
        outputs, rows, _, width = self.gradients.shape
        return Outline.like(self.gradients, rows, outputs, self.entries * width)

    @cached_property
    def merged(self) -> Tensor:
        """Gradients (D, N, T, E) with the sum over an entry's positions in a row at the first of them."""
        same = self.index.unsqueeze(1) == self.index.unsqueeze(2)  # (N, T, T)
        first = same.to(torch.int8).argmax(-1) == torch.arange(self.index.shape[1], device=self.index.device)
        return (same & first.unsqueeze(-1)).to(self.dtype) @ self.gradients

    def rows(self) -> Tensor:
        outputs, num, positions, width = self.gradients.shape
        dense = self.gradients.new_zeros(num, outputs, self.entries, width)
        index = self.index[:, None, :, None].expand(num, outputs, positions, width)
        return dense.scatter_add(2, index, self.gradients.transpose(0, 1)).flatten(2)

    def summed(self) -> Tensor:
        total = self.gradients.new_zeros(self.entries, self.gradients.shape[-1])
        return total.index_add_(0, self.index.flatten(), self.gradients.sum(0).flatten(0, 1)).flatten()

    def narrow(self, low: int, high: int) -> "Lookup":
        return Lookup(self.index[low:high], self.gradients[:, low:high], self.entries, self.padding)

    def counts(self, weights: Tensor | None) -> Tensor:
        """Sum over rows of the share of positions at which each entry is looked up, (V,)."""
        positions = self.index.shape[1]
        each = self.index.new_ones(self.num_rows, dtype=self.dtype) if weights is None else weights.to(self.dtype)
        counts = each.new_zeros(self.entries)
        counts.index_add_(0, self.index.flatten(), each.repeat_interleave(positions))
        if self.padding is not None:
            counts[self.padding] = 0.0
        return counts / positions

    def outer_gram(self) -> Tensor:
        """Sum of g g^T over outputs, rows and positions, (E, E)."""
        flat = self.gradients.flatten(0, 2)
        return flat.T @ flat

    def rotated(self, inner: Tensor) -> "Lookup":
        """J in the coordinates table @ inner, for inner (E, E)."""
        return Lookup(self.index, self.gradients @ inner.to(self.dtype), self.entries, self.padding)

    def squares(self) -> Tensor:
        values = self.merged.square().sum(0).flatten(0, 1)  # (N T, E)
        return values.new_zeros(self.entries, values.shape[-1]).index_add(0, self.index.flatten(), values).flatten()

    def weighted_gram(self, variance: Tensor) -> Tensor:
        table = variance.to(self.dtype).view(self.entries, -1)[self.index]  # (N, T, E)
        half = self.merged.transpose(0, 1)  # (N, D, T, E)
        return (half * table.unsqueeze(1)).flatten(2) @ half.flatten(2).mT

    def weighted_squares(self, variance: Tensor) -> Tensor:
        table = variance.to(self.dtype).view(self.entries, -1)[self.index]  # (N, T, E)
        return (self.merged.square() * table).sum((-2, -1)).T

    def products(self, vectors: Tensor) -> Tensor:
        tables = vectors.to(self.dtype).view(len(vectors), self.entries, -1)
        half = self.gradients.transpose(0, 1).flatten(2)  # (N, D, T E)
        return torch.stack([(half @ table[self.index].flatten(1).unsqueeze(-1)).squeeze(-1) for table in tables])

    def joint_gram(self, variance: Tensor) -> Tensor:
        used, index = torch.unique(self.index, return_inverse=True)
        rows = Lookup(index, self.gradients, used.numel()).rows()
        rows = (rows * variance.view(self.entries, -1)[used].flatten().sqrt().to(self.dtype)).flatten(0, 1)
        return rows @ rows.mT


@dataclass(frozen=True, eq=False)
class Thin(Jacobian):
    """A `Matrix` with one position and one group, whose D gradients (N, O) are held in a tuple.

    Sums over columns take them one at a time, while they are in the cache; everything else stacks them first.

    >>> Thin(torch.ones(1, 2), (torch.full((1, 1), 3.0), torch.zeros(1, 1)), bias=True).squares()
    tensor([9., 9., 9.])
    """

    features: Tensor | None  # (N, I)
    columns: tuple[Tensor, ...]
    bias: bool

    @cached_property
    def matrix(self) -> Matrix:
        """The columns stacked."""
        stacked = torch.stack(self.columns, 1).transpose(0, 1)  # the columns of a row are adjacent in memory
        features = None if self.features is None else self.features[:, None, None]
        return Matrix(features, stacked[:, :, None, None], self.bias)

    @property
    def outline(self) -> Outline:
        rows, out = self.columns[0].shape
        width = 1 if self.features is None else self.features.shape[1] + int(self.bias)
        return Outline.like(self.columns[0], rows, len(self.columns), out * width)

    @cached_property
    def inputs(self) -> Tensor:
        """Features, with a last 1 for the bias, (N, I)."""
        if self.features is not None and not self.bias:
            return self.features
        ones = self.columns[0].new_ones(self.num_rows, 1)
        return ones if self.features is None else torch.cat([self.features, ones], -1)

    def rows(self) -> Tensor:
        return self.matrix.rows()

    def summed(self) -> Tensor:
        return self.matrix.summed()

    def narrow(self, low: int, high: int) -> "Thin":
        features = None if self.features is None else self.features[low:high]
        return Thin(features, tuple(column[low:high] for column in self.columns), self.bias)

    def squares(self) -> Tensor:
        return (self._outer_squares.T @ self.inputs.square()).flatten()

    def add_squares(self, block: Block, total: Tensor) -> None:
        outer, views = self._outer_squares, block.views(total)
        if self.features is not None:
            views[0].addmm_(outer.T, self.features.square())
        if self.bias:
            views[-1].add_(outer.sum(0).unsqueeze(-1))

    @property
    def _outer_squares(self) -> Tensor:
        """Sum over outputs of the squares of the gradients, (N, O)."""
        outer = torch.zeros_like(self.columns[0])
        for column in self.columns:
            outer.addcmul_(column, column)
        return outer

    def weighted_gram(self, variance: Tensor) -> Tensor:
        return self.matrix.weighted_gram(variance)

    def weighted_squares(self, variance: Tensor) -> Tensor:
        table = variance.to(self.dtype).view(self.columns[0].shape[1], -1)  # (O, I)
        if self.features is None or not self.bias:
            inside = self.inputs.square() @ table.T
        else:
            inside = self.features.square() @ table[:, :-1].T + table[:, -1]  # (N, O), without a copy of the features
        return torch.stack([torch.linalg.vecdot(column.square(), inside) for column in self.columns], 1)

    def joint_gram(self, variance: Tensor) -> Tensor:
        return self.matrix.joint_gram(variance)

    def products(self, vectors: Tensor) -> Tensor:
        return self.matrix.products(vectors)

    def outer_squares(self) -> Tensor:
        """The diagonal of `outer_gram`, (O,)."""
        return self._outer_squares.sum(0)

    def rotated(self, outer: Tensor | None, inner: Tensor) -> "Thin":
        """J in the coordinates outer^T W inner, for outer (1, O, O), None the identity, and inner (1, I, I)."""
        base = inner[0].to(self.dtype)
        columns = self.columns if outer is None else tuple(column @ outer[0].to(self.dtype) for column in self.columns)
        if self.features is None or not self.bias:
            return Thin(self.inputs @ base, columns, bias=False)
        return Thin(torch.addmm(base[-1], self.features, base[:-1]), columns, bias=False)

    def inner_gram(self, weights: Tensor | None, out: Tensor | None = None) -> Tensor:
        """`Matrix.inner_gram`, added to `out` (1, I, I) if given."""
        width = self.inputs.shape[1] if self.features is None or not self.bias else self.features.shape[1] + 1
        total = self.columns[0].new_zeros(1, width, width) if out is None else out
        if self.bias:
            total[0, -1, -1] += self.num_rows if weights is None else weights.sum().to(self.dtype)
        if self.features is None:
            return total
        features = self.features
        weighted = features if weights is None else features * weights.to(self.dtype).unsqueeze(-1)
        square = total[0, : features.shape[1], : features.shape[1]]
        if weights is None:
            upper_gram(features, square)
        else:
            square.addmm_(features.T, weighted)
        if self.bias:
            total[0, :-1, -1] += weighted.sum(0)
        return total

    def outer_gram(self, out: Tensor | None = None) -> Tensor:
        """`Matrix.outer_gram`, added to `out` (1, O, O) if given."""
        size = self.columns[0].shape[1]
        total = self.columns[0].new_zeros(1, size, size) if out is None else out
        for column in self.columns if size >= LEAST else (torch.cat(self.columns),):
            upper_gram(column, total[0])
        return total
