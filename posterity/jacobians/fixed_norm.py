"""Batch norm with fixed statistics, whose backward pass goes well with a batch of columns."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


class _Fixed(torch.autograd.Function):
    """source times `scale` (C,) plus a shift, as `function` computes it."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, scale: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(scale)
        return function(source)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        (grad,) = grad_outputs
        (scale,) = ctx.saved_tensors
        return grad * scale.view(-1, *[1] * (grad.dim() - 2)), None, None


def batch_norm(source: Tensor, *, weight: Tensor | None = None, eps: float = 1e-5, **given: Any) -> Tensor:
    """`torch.nn.functional.batch_norm` in evaluation mode, which passes gradients to its source alone.

    Backward, each channel is multiplied by one number. torch's own backward pass copies both gradient and input under
    vmap, and moves their channels first in memory.

    >>> statistics = {"running_mean": torch.zeros(2), "running_var": torch.ones(2)}
    >>> batch_norm(torch.tensor([[1.0, 2.0]]), weight=torch.tensor([3.0, 1.0]), eps=0.0, **statistics)
    tensor([[3., 2.]])
    """
    scale = (given["running_var"] + eps).rsqrt()
    scale = scale if weight is None else scale * weight
    apply: Any = _Fixed.apply
    output: Tensor = apply(source, scale, partial(functional.batch_norm, weight=weight, eps=eps, **given))
    return output
