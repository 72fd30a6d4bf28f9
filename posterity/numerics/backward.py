"""Backward passes without the checks of their arguments."""

import torch
from torch import Tensor
from torch.autograd.variable import Variable


def backward(value: Tensor, factor: float) -> None:
    """`(factor * value).backward()` for a value () of one's own; `factor` is no part of the graph.

    What `Tensor.backward` asks of its arguments takes as long as the layers of a small network.

    >>> leaf = torch.tensor(3.0, requires_grad=True)
    >>> backward(leaf.square(), 0.5)
    >>> leaf.grad
    tensor(3.)
    """
    grad = torch.full((), factor, dtype=value.dtype, device=value.device)
    Variable._execution_engine.run_backward(
        (value,), (grad,), False, False, (), allow_unreachable=True, accumulate_grad=True
    )
