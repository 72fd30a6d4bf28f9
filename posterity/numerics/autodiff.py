"""Hessians and Jacobians by automatic differentiation."""

from collections.abc import Callable

import torch
from torch import Tensor

MEMORY_BUDGET = 1 << 29  # bytes that one chunk of derivatives may take


def chunk_rows(bytes_per_row: int, budget: int = MEMORY_BUDGET) -> int:
    """Number of rows of `bytes_per_row` that fit the budget, at least one."""
    return max(1, budget // max(1, bytes_per_row))


def dense_hessian(function: Callable[[Tensor], Tensor], theta: Tensor) -> Tensor:
    """Hessian (P, P) of a scalar function at theta (P,), one backward pass of the gradient for each row.

    >>> dense_hessian(lambda t: (t**3).sum(), torch.tensor([1.0, 2.0]))
    tensor([[ 6.,  0.],
            [ 0., 12.]])
    """
    chunk = chunk_rows(4 * theta.element_size() * len(theta))
    hessian: Tensor = torch.func.jacrev(torch.func.grad(function), chunk_size=chunk)(theta)
    return 0.5 * (hessian + hessian.transpose(-2, -1))


def row_jacobians(function: Callable[[Tensor, object], Tensor], theta: Tensor, rows: object) -> tuple[Tensor, Tensor]:
    """Outputs (N, D) and Jacobians (N, D, P) of `function(theta, row) -> (*event)` for each row.

    `rows` is a tensor, tuple or dict of tensors with a leading axis N.
    """

    def with_value(weights: Tensor, row: object) -> tuple[Tensor, Tensor]:
        outputs = function(weights, row).reshape(-1)
        return outputs, outputs

    jacobian, outputs = torch.func.vmap(torch.func.jacrev(with_value, has_aux=True), in_dims=(None, 0))(theta, rows)
    return outputs, jacobian
