"""The output layer under a Fisher information in closed form, which needs no columns."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from posterity.jacobians import jacobian
from posterity.jacobians.jacobian import Jacobian, Outline


@dataclass(frozen=True, eq=False)
class OutputLayer(Jacobian):
    """J^T S of layers z = W a + b whose z are the logits of M labels, S S^T = w (diag(p) - p p^T) for each of them.

    `features` a (M, I), None where only the bias is wanted, `probabilities` p (M, C) and `weights` w (M,), None where
    all are 1. A row of the data has `positions` labels. Sums of J^T S S^T J are in float64 and take C^2 numbers a
    label, where its C columns would take C^3.

    >>> part = OutputLayer(torch.full((1, 1), 2.0), torch.full((1, 2), 0.5), bias=False)
    >>> part.gram()
    tensor([[ 1., -1.],
            [-1.,  1.]], dtype=torch.float64)
    """

    features: Tensor | None
    probabilities: Tensor
    bias: bool
    weights: Tensor | None = None
    positions: int = 1

    closed = True

    @property
    def outline(self) -> Outline:
        labels, classes = self.probabilities.shape
        return Outline.like(self.probabilities, labels, classes, classes * self.inputs.shape[1])

    @cached_property
    def inputs(self) -> Tensor:
        """Features in float64, with a last 1 for the bias, (M, I)."""
        ones = [self._p.new_ones(len(self._p), 1)] if self.bias else []
        return torch.cat([*([] if self.features is None else [self.features.to(self._p)]), *ones], -1)

    @cached_property
    def _p(self) -> Tensor:
        """Probabilities in float64, whose sum is 1 to rounding there: else C would have eigenvalues below zero."""
        p = self.probabilities.to(torch.float64)
        return p / p.sum(-1, keepdim=True)

    def _weighted(self, values: Tensor) -> Tensor:
        """w times values (M, ...)."""
        return values if self.weights is None else values * self.weights.to(values).unsqueeze(-1)

    def rows(self) -> Tensor:
        """With the C columns p_c^1/2 (e_c - p) of a label."""
        root = self._p.sqrt()
        root = root if self.weights is None else root * self.weights.to(root).sqrt().unsqueeze(-1)
        columns = root.unsqueeze(-1) * (torch.eye(len(root.T)).to(root) - self._p.unsqueeze(-2))  # (M, columns, C)
        return (columns.unsqueeze(-1) * self.inputs[:, None, None]).flatten(2)

    def narrow(self, low: int, high: int) -> "OutputLayer":
        features = None if self.features is None else self.features[low:high]
        weights = None if self.weights is None else self.weights[low:high]
        return OutputLayer(features, self.probabilities[low:high], self.bias, weights, self.positions)

    def squares(self) -> Tensor:
        return (self._weighted(self._p * (1.0 - self._p)).T @ self.inputs.square()).flatten()

    def outer_gram(self) -> Tensor:
        """Sum of w (diag(p) - p p^T) over the labels, (1, C, C)."""
        weighted = self._weighted(self._p)
        return (weighted.sum(0).diag() - weighted.T @ self._p).unsqueeze(0)

    def inner_gram(self) -> Tensor:
        """Sum over rows of the weighted mean over positions of a a^T, (1, I, I)."""
        return (self._weighted(self.inputs).T @ self.inputs).unsqueeze(0) / self.positions

    def gram(self, out: Tensor | None = None) -> Tensor:
        classes, width = self._p.shape[1], self.inputs.shape[1]
        total = self._p.new_zeros(classes, width, classes, width)
        step = max(1, jacobian.chunk_size(self.device) // max(1, classes * width))
        own = total.diagonal(dim1=0, dim2=2)  # (I, I, C)
        for low in range(0, len(self._p), step):
            part = self.narrow(low, low + step)
            both = part._p.unsqueeze(-1) * part.inputs.unsqueeze(1)  # (m, C, I)
            weighted = both if part.weights is None else both * part.weights.to(both).view(-1, 1, 1)
            own += (weighted.permute(1, 2, 0) @ part.inputs).permute(1, 2, 0)
            total.view(classes * width, -1).addmm_(weighted.flatten(1).T, both.flatten(1), alpha=-1.0)
        whole = total.view(classes * width, -1)
        whole = 0.5 * (whole + whole.T)
        return whole if out is None else out.add_(whole)

    def outer_squares(self) -> Tensor:
        """Sum of w p (1 - p) over the labels, (C,): the diagonal of `outer_gram`."""
        return self._weighted(self._p * (1.0 - self._p)).sum(0)

    def rotated_squares(self, outer: Tensor | None, inner: Tensor) -> Tensor:
        """The diagonal of B^T J^T S S^T J B for B = outer (x) inner, (1, C, C) and (1, I, I), summed over labels.

        None stands for an outer basis of unit vectors.
        """
        if outer is None:
            spread = self._p * (1.0 - self._p)
        else:
            turn = outer[0].to(self._p)
            spread = (self._p @ turn.square() - (self._p @ turn).square()).clamp_min(0.0)  # (M, C)
        return (self._weighted(spread).T @ (self.inputs @ inner[0].to(self._p)).square()).flatten()
