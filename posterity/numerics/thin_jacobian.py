"""Derivatives in the weights of a linear layer that acts once on each row, column by column."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from posterity.numerics.block import Block
from posterity.numerics.gram import LEAST, upper_gram
from posterity.numerics.jacobian import Jacobian, Outline
from posterity.numerics.layer_jacobians import Matrix


@dataclass(frozen=True, eq=False)
class Thin(Jacobian):
    """As `Matrix` with one position and one group, its gradients (N, O) in a tuple of D.

    What is a sum over columns takes them one by one, while they are in the cache; all else stacks them first.

    >>> Thin(torch.ones(1, 2), (torch.full((1, 1), 3.0), torch.zeros(1, 1)), bias=True).squares()
    tensor([9., 9., 9.])
    """

    features: Tensor | None  # (N, I)
    columns: tuple[Tensor, ...]
    bias: bool

    @cached_property
    def matrix(self) -> Matrix:
        """The columns stacked."""
        stacked = torch.stack(self.columns, 1).transpose(0, 1)  # in memory the columns of a row lie together
        features = None if self.features is None else self.features[:, None, None]
        return Matrix(features, stacked[:, :, None, None], self.bias)

    @property
    def outline(self) -> Outline:
        """R = O I, the bias counted in I."""
        rows, out = self.columns[0].shape
        width = 1 if self.features is None else self.features.shape[1] + int(self.bias)
        return Outline.like(self.columns[0], rows, len(self.columns), out * width)

    @cached_property
    def inputs(self) -> Tensor:
        """Features with the 1 of the bias, (N, I)."""
        if self.features is not None and not self.bias:
            return self.features
        ones = self.columns[0].new_ones(self.num_rows, 1)
        return ones if self.features is None else torch.cat([self.features, ones], -1)

    def rows(self) -> Tensor:
        """As of `Matrix`."""
        return self.matrix.rows()

    def narrow(self, low: int, high: int) -> "Thin":
        """Those rows."""
        features = None if self.features is None else self.features[low:high]
        return Thin(features, tuple(column[low:high] for column in self.columns), self.bias)

    def squares(self) -> Tensor:
        """A product of the squares of the factors."""
        return (self._outer_squares.T @ self.inputs.square()).flatten()

    def add_squares(self, block: Block, total: Tensor) -> None:
        """The same, straight to its places."""
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
        """As of `Matrix`."""
        return self.matrix.weighted_gram(variance)

    def weighted_squares(self, variance: Tensor) -> Tensor:
        """U^2 (inner^2 variance) with U the gradients."""
        table = variance.to(self.dtype).view(self.columns[0].shape[1], -1)  # (O, I)
        if self.features is None or not self.bias:
            inside = self.inputs.square() @ table.T
        else:
            inside = self.features.square() @ table[:, :-1].T + table[:, -1]  # (N, O), without a copy that has the 1
        return torch.stack([torch.linalg.vecdot(column.square(), inside) for column in self.columns], 1)

    def joint_gram(self, variance: Tensor) -> Tensor:
        """As of `Matrix`."""
        return self.matrix.joint_gram(variance)

    def products(self, vectors: Tensor) -> Tensor:
        """As of `Matrix`."""
        return self.matrix.products(vectors)

    def rotated(self, outer: Tensor, inner: Tensor) -> "Thin":
        """As of `Matrix`."""
        turn, base = outer[0].to(self.dtype), inner[0].to(self.dtype)
        columns = tuple(column @ turn for column in self.columns)
        if self.features is None or not self.bias:
            return Thin(self.inputs @ base, columns, bias=False)
        return Thin(torch.addmm(base[-1], self.features, base[:-1]), columns, bias=False)

    def inner_gram(self, weights: Tensor | None, out: Tensor | None = None) -> Tensor:
        """As of `Matrix`; added to `out` (1, I, I) where that is given."""
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
        """As of `Matrix`; added to `out` (1, O, O) where that is given."""
        size = self.columns[0].shape[1]
        total = self.columns[0].new_zeros(1, size, size) if out is None else out
        for column in self.columns if size >= LEAST else (torch.cat(self.columns),):
            upper_gram(column, total[0])
        return total
