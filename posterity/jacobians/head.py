"""Jacobian of network outputs in the weights of the last layer, which needs no backward pass."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from posterity.jacobians import jacobian
from posterity.jacobians.jacobian import Jacobian, Outline


@dataclass(frozen=True, eq=False)
class Head(Jacobian):
    """Derivatives of network outputs z = W a + b in W and b: a `Matrix` whose gradients are the unit vectors.

    J[n, d, (o, i)] = basis[d, o] features[n, i], with a last i of feature 1 for the bias. `features` are (N, I);
    `basis` (D, D) rotates the outputs of all rows, and None stands for the identity. Where the layer runs at several
    `positions` T, features are (N T, I), and the outputs of a row are ordered by d, then position.

    >>> Head(torch.tensor([[2.0]]), bias=True, outputs=2).rows()
    tensor([[[2., 1., 0., 0.],
             [0., 0., 2., 1.]]])
    """

    features: Tensor
    bias: bool
    outputs: int
    basis: Tensor | None = None
    positions: int = 1

    @property
    def outline(self) -> Outline:
        rows, width = len(self.features) // self.positions, self.features.shape[1] + int(self.bias)
        return Outline.like(self.features, rows, self.outputs * self.positions, self.outputs * width)

    @cached_property
    def inputs(self) -> Tensor:
        """Features, with a last 1 for the bias, (N, I)."""
        if not self.bias:
            return self.features
        return torch.cat([self.features, self.features.new_ones(len(self.features), 1)], -1)

    def _by_row(self, values: Tensor, axis: int) -> Tensor:
        """Values (..., N T, D, ...) with N T on this axis, as (..., N, D T, ...)."""
        if self.positions == 1:
            return values
        split = values.reshape(*values.shape[:axis], -1, self.positions, *values.shape[axis + 1 :])
        return split.transpose(axis + 1, axis + 2).flatten(axis + 1, axis + 2)

    def rows(self) -> Tensor:
        basis = torch.eye(self.outputs, dtype=self.dtype, device=self.device) if self.basis is None else self.basis
        return self._by_row((basis[:, :, None] * self.inputs[:, None, None, :]).flatten(2), 0)

    def narrow(self, low: int, high: int) -> "Head":
        features = self.features[low * self.positions : high * self.positions]
        return Head(features, self.bias, self.outputs, self.basis, self.positions)

    def rotated(self, outer: Tensor | None, inner: Tensor) -> "Head":
        """J in the coordinates W -> outer^T W inner, for outer (1, D, D), None the identity, and inner (1, I, I).

        The bias is in I.
        """
        basis = self.basis
        if outer is not None:
            turn = outer[0].to(self.dtype)
            basis = turn if basis is None else basis @ turn
        return Head(self.inputs @ inner[0].to(self.dtype), False, self.outputs, basis, self.positions)

    def squares(self) -> Tensor:
        inner = self.inputs.square().sum(0)
        outer = inner.new_ones(self.outputs) if self.basis is None else self.basis.square().sum(0)
        return (outer.unsqueeze(-1) * inner).flatten()

    def _inside(self, variance: Tensor) -> Tensor:
        """Variances (N T, D) of the rotated outputs, which are independent."""
        return self.inputs.square() @ variance.to(self.dtype).view(self.outputs, -1).T

    def weighted_gram(self, variance: Tensor) -> Tensor:
        if self.positions > 1:  # with covariances between positions
            return super().weighted_gram(variance)
        return self._outer(self._inside(variance))

    def _outer(self, inside: Tensor) -> Tensor:
        """basis diag(inside) basis^T, (..., D, D), of variances (..., D)."""
        if self.basis is None:
            return torch.diag_embed(inside)
        return (self.basis * inside.unsqueeze(-2)) @ self.basis.T

    def weighted_squares(self, variance: Tensor) -> Tensor:
        inside = self._inside(variance)
        return self._by_row(inside if self.basis is None else inside @ self.basis.square().T, 0)

    def row_draws(self, variance: Tensor, noise: Tensor) -> Tensor | None:
        if self.positions > 1:
            return None
        draws = noise * self._inside(variance).sqrt()
        return draws if self.basis is None else draws @ self.basis.T

    def products(self, vectors: Tensor) -> Tensor:
        products = self.inputs @ vectors.to(self.dtype).view(len(vectors), self.outputs, -1).mT  # (S, N T, D)
        return self._by_row(products if self.basis is None else products @ self.basis.T, 1)

    def joint_gram(self, variance: Tensor) -> Tensor:
        if self.positions > 1:
            return super().joint_gram(variance)
        table = variance.to(self.dtype).view(self.outputs, -1)
        num, out = self.num_rows, self.outputs
        step = max(1, jacobian.chunk_size(self.device) // max(1, num * (self.inputs.shape[1] + out * out)))
        parts = []
        for low in range(0, num, step):
            inside = (self.inputs[low : low + step, None] * self.inputs) @ table.T  # (n, N, D)
            parts.append(self._outer(inside).transpose(1, 2).flatten(2).flatten(0, 1))  # (n D, N D)
        whole = torch.cat(parts)
        return 0.5 * (whole + whole.mT)
