"""The exponential integral, scaled so that it neither overflows nor underflows."""

import math
from typing import Any

import torch
from torch import Tensor

_EULER = 0.57721566490153286
_BORDER = 3.0  # below: the power series; above: the continued fraction
_TERMS = 28  # of the series: the next one is below 1e-17 at the border
_DEPTH = 30  # of the fraction: its error is below 1e-13 at the border


def scaled_exponential_integral(values: Tensor, order: int = 1) -> Tensor:
    """G_n(x) = e^x E_n(x) = integral over s > 0 of e^(-x s) (1 + s)^(-n), for x >= 0 and order n >= 1.

    G_1 is infinite at 0, where it behaves as -log x - 0.5772, and falls as 1 / x. It is computed in float64 to a
    relative error of 1e-12 and differentiable to any order: G_1' = G_1 - 1/x, and G_n' = G_n - G_(n-1).

    >>> round(scaled_exponential_integral(torch.tensor(1.0)).item(), 5)
    0.59635
    """
    result: Tensor = _Scaled.apply(values, order)  # type: ignore[no-untyped-call]
    return result


class _Scaled(torch.autograd.Function):
    """G_n with derivatives that keep their digits at both ends."""

    generate_vmap_rule = True

    @staticmethod
    def forward(values: Tensor, order: int) -> Tensor:
        exact = values.double()
        near, far = exact.clamp_max(_BORDER), exact.clamp_min(_BORDER)
        return torch.where(exact < _BORDER, _near(near, order), _far(far, order)).to(values.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        values, ctx.order = inputs
        ctx.save_for_backward(values, output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        values, result = ctx.saved_tensors
        n = ctx.order
        # From n G_(n+1) + x G_n = 1: this form does not cancel for large x, where G_n and G_(n-1) agree.
        slope = ((n - 1) * result - n * scaled_exponential_integral(values, n + 1)) / values
        if n > 1:
            slope = torch.where(values < 1.0, result - scaled_exponential_integral(values, n - 1), slope)
        return grads[0] * slope, None


def _near(values: Tensor, order: int) -> Tensor:
    """E_1(x) = -gamma - log x + sum over k of (-1)^(k+1) x^k / (k k!), then (n - 1) E_n = e^-x - x E_(n-1)."""
    total = torch.zeros_like(values)
    for k in range(_TERMS, 0, -1):
        total.add_((-1.0) ** (k + 1) / (k * math.factorial(k))).mul_(values)
    result = values.exp() * (total - values.log() - _EULER)
    for n in range(2, order + 1):
        # x G_1 is 0 at 0, where G_1 is infinite
        result = (1.0 - torch.where(values > 0.0, values * result, torch.zeros_like(values))) / (n - 1)
    return result


def _far(values: Tensor, order: int) -> Tensor:
    """G_n(x) = 1 / (x + n - 1 n / (x + n + 2 - 2 (n + 1) / (x + n + 4 - ...)))."""
    tail = values + (order + 2 * _DEPTH)
    for k in range(_DEPTH, 0, -1):
        tail.reciprocal_().mul_(-k * (order + k - 1)).add_(values).add_(order + 2 * (k - 1))
    return 1.0 / tail
