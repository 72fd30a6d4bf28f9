"""Expectations of functions of one normal variable, by the trapezoid rule."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_REACH = 9.0  # standard deviations on either side: the mass beyond is 2e-19
_CLOSEST = 1e-8  # the least distance, in standard deviations, that the nodes resolve around zero
_BUDGET = 2**20  # function values held at once


def normal_expectation(
    function: Callable[[Tensor], Tensor], mean: Tensor, scale: Tensor, points: int = 401, width: float | None = None
) -> Tensor:
    """Return E f(w) for w ~ N(mean, scale^2), entry by entry: tensors (...) and (...) -> (...).

    The trapezoid rule with `points` nodes over mean +- 9 scale, whose error falls faster than any power of the
    spacing for smooth f. Without `width` the nodes are equidistant: for f that varies over distances of `scale`
    or more. With it w = width sinh(t) and the nodes are equidistant in t: for f that varies over distances of
    `width` around zero and only over distances of |w| beyond, however large `scale` is. `width=0.0` is for a kink
    or an integrable singularity at zero: the nodes crowd there down to 1e-8 scale, which leaves an error of that
    order.

    It is computed in float64, in pieces of bounded memory, and is differentiable in mean and scale to any order
    through E[f(w) He_n((w - mean) / scale)], so f itself need not be. Parameters inside f are not differentiated: let
    hyper-parameters enter through mean and scale. The value at scale 0 is f(mean); the gradient there is nan.

    >>> normal_expectation(torch.cos, torch.tensor(0.0), torch.tensor(1.0)), torch.tensor(-0.5).exp()
    (tensor(0.6065), tensor(0.6065))
    """
    mean, scale = torch.broadcast_tensors(mean, scale)  # type: ignore[no-untyped-call]
    moments: Tensor = _HermiteMoments.apply(mean, scale, function, (0,), points, width)  # type: ignore[no-untyped-call]
    return moments[0]


class _HermiteMoments(torch.autograd.Function):
    """The moments I_n = E[f(w) He_n(z)], z = (w - mean) / scale, for each order n: (...) and (...) -> (orders, ...).

    With D = d/dw, I_n = scale^n E[D^n f], hence dI_n / dmean = I_{n+1} / scale and
    dI_n / dscale = (n I_n + I_{n+2}) / scale (the heat equation).
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        mean: Tensor,
        scale: Tensor,
        function: Callable[[Tensor], Tensor],
        orders: Sequence[int],
        points: int,
        width: float | None,
    ) -> Tensor:
        rows = max(1, _BUDGET // points)
        means, scales = (torch.split(value.reshape(-1, 1).double(), rows) for value in (mean, scale))
        pieces = []  # (orders, rows) each
        for m, s in zip(means, scales, strict=True):
            deviations, weights = _equidistant(m, points) if width is None else crowded_nodes(m, s, points, width)
            weights = weights / weights.sum(-1, keepdim=True)  # a constant has its expectation to the last bit
            values = function(m + s * deviations)  # (rows, points)
            average = (weights * values).sum(-1, keepdim=True)
            centred = weights * (values - average)  # E He_n = 0 for n > 0: the average would only add rounding
            moments = [(centred * _hermite(n, deviations)).sum(-1) if n else average.squeeze(-1) for n in orders]
            pieces.append(torch.stack(moments))
        return torch.cat(pieces, dim=-1).reshape(len(orders), *mean.shape).to(mean.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        mean, scale, *ctx.rest = inputs
        ctx.save_for_backward(mean, scale)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        mean, scale = ctx.saved_tensors
        function, orders, points, width = ctx.rest
        wanted = tuple(sorted({n for n in orders if n} | {n + 1 for n in orders} | {n + 2 for n in orders}))
        values: Tensor = _HermiteMoments.apply(mean, scale, function, wanted, points, width)  # type: ignore[no-untyped-call]
        moments = dict(zip(wanted, values, strict=True))
        grad_mean, grad_scale = torch.zeros_like(mean), torch.zeros_like(scale)
        for n, grad in zip(orders, grads[0], strict=True):
            grad_mean = grad_mean + grad * moments[n + 1]
            grad_scale = grad_scale + grad * (n * moments[n] + moments[n + 2] if n else moments[n + 2])
        return grad_mean / scale, grad_scale / scale, None, None, None, None


def _equidistant(mean: Tensor, points: int) -> tuple[Tensor, Tensor]:
    """Return standardised nodes z and their weights, (1, points) each."""
    deviations = torch.linspace(-_REACH, _REACH, points, dtype=mean.dtype, device=mean.device).unsqueeze(0)
    return deviations, torch.exp(-0.5 * deviations.square())


def crowded_nodes(mean: Tensor, scale: Tensor, points: int, width: float) -> tuple[Tensor, Tensor]:
    """Return standardised nodes z of w = width sinh(t), equidistant in t, and weights: (..., 1) -> (..., points).

    E f(w) is the sum of the weights times f(mean + scale z), over the sum of the weights; see `normal_expectation`.
    """
    widths = torch.clamp(_CLOSEST * scale, min=width)
    ends = [torch.asinh((mean + sign * _REACH * scale) / widths) for sign in (-1.0, 1.0)]  # (..., 1)
    grid = torch.linspace(0.0, 1.0, points, dtype=mean.dtype, device=mean.device)
    nodes = ends[0] + (ends[1] - ends[0]) * grid  # t, (..., points)
    deviations = (widths * nodes.sinh() - mean) / scale
    weights = torch.exp(-0.5 * deviations.square()) * nodes.cosh()
    # Where t hardly varies the nodes are equidistant in w as well, and the difference above would cancel.
    narrow = _REACH * scale < 1e-4 * torch.hypot(mean, widths)
    flat_deviations, flat_weights = _equidistant(mean, points)
    return torch.where(narrow, flat_deviations, deviations), torch.where(narrow, flat_weights, weights)


def _hermite(order: int, values: Tensor) -> Tensor:
    """Evaluate the probabilists' Hermite polynomial He_order."""
    before, polynomial = torch.zeros_like(values), torch.ones_like(values)
    for n in range(order):
        before, polynomial = polynomial, values * polynomial - n * before
    return polynomial
