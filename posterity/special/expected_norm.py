"""The expected length of a normal vector."""

import math
from typing import Any

import torch
from torch import Tensor

_START, _STOP, _STEP = -7.5, 11.0, 0.25  # nodes v = log(u r) of the rule in `expected_norm`
_BUDGET = 2**20  # numbers held at once


def expected_absolute(mean: Tensor, scale: Tensor) -> Tensor:
    """E|w| for w ~ N(mean, scale^2), entry by entry.

    It is scale sqrt(2 / pi) exp(-mean^2 / (2 scale^2)) + mean erf(mean / (scale sqrt(2))).

    >>> expected_absolute(torch.tensor([0.0, 3.0]), torch.tensor([1.0, 0.1]))
    tensor([0.7979, 3.0000])
    """
    ratio = mean / scale
    density = math.sqrt(2.0 / math.pi) * torch.exp(-0.5 * ratio.square())
    return scale * density + mean * torch.erf(ratio * math.sqrt(0.5))


def expected_norm(mean: Tensor, scale: Tensor) -> Tensor:
    """E||w|| for independent w_i ~ N(mean_i, scale_i^2), over the last axis: (..., n) and (..., n) -> (...).

    From ||w|| = (1 / sqrt(pi)) integral over u > 0 of (1 - exp(-u^2 ||w||^2)) / u^2, with
    M(t) = E exp(-t ||w||^2) = product over i of (1 + 2 t scale_i^2)^(-1/2) exp(-t mean_i^2 / (1 + 2 t scale_i^2)) and
    r^2 = E||w||^2, it is r + (1 / sqrt(pi)) integral of (exp(-u^2 r^2) - M(u^2)) / u^2. In v = log(u r) the difference
    is analytic and falls exponentially at both ends, so the trapezoid rule is accurate to 1e-9 r.

    It is computed in float64, in pieces of bounded memory, and is differentiable to any order.

    >>> expected_norm(torch.tensor([3.0, 4.0]), torch.tensor([0.01, 0.01]))
    tensor(5.0000)
    """
    mean, scale = torch.broadcast_tensors(mean, scale)  # type: ignore[no-untyped-call]
    if mean.shape[-1] == 1:
        return expected_absolute(mean, scale).squeeze(-1)
    result: Tensor = _ExpectedNorm.apply(mean, scale)  # type: ignore[no-untyped-call]
    return result


class _ExpectedNorm(torch.autograd.Function):
    """The integral and its gradient, each by one pass over the nodes; higher derivatives are autograd's."""

    generate_vmap_rule = True

    @staticmethod
    def forward(mean: Tensor, scale: Tensor) -> Tensor:
        pieces = [_value(*piece) for piece in _rows(mean, scale)]
        return torch.cat(pieces).reshape(mean.shape[:-1]).to(mean.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        mean, scale = ctx.saved_tensors
        slopes = [_slopes(*piece) for piece in _rows(mean, scale)]
        return tuple(  # type: ignore[return-value]
            torch.cat(parts).reshape(mean.shape).to(mean.dtype) * grads[0].unsqueeze(-1)
            for parts in zip(*slopes, strict=True)
        )


def _rows(mean: Tensor, scale: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Both as float64 (rows, n), in pieces."""
    size = mean.shape[-1]
    rows = max(1, _BUDGET // (size * len(_nodes(mean))))
    means, scales = (torch.split(value.reshape(-1, size).double(), rows) for value in (mean, scale))
    return list(zip(means, scales, strict=True))


def _nodes(like: Tensor) -> Tensor:
    """Equidistant v."""
    return torch.arange(_START, _STOP, _STEP, dtype=torch.float64, device=like.device)


def _transform(mean: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """r (rows, 1), u (rows, nodes), 1 + 2 t scale^2 (rows, nodes, n) and M(t) (rows, nodes), all with t = u^2."""
    root = (mean.square() + scale.square()).sum(-1, keepdim=True).sqrt().clamp_min(1e-100)
    distances = _nodes(mean).exp() / root
    times = distances.square().unsqueeze(-1)
    widths = 1.0 + 2.0 * times * scale.square().unsqueeze(-2)
    exponents = -0.5 * widths.log() - times * mean.square().unsqueeze(-2) / widths
    return root, distances, widths, exponents.sum(-1).exp()


def _value(mean: Tensor, scale: Tensor) -> Tensor:
    """E||w|| of each row."""
    root, distances, _, transform = _transform(mean, scale)
    difference = torch.exp(-_nodes(mean).mul(2.0).exp()) - transform
    return root.squeeze(-1) + (difference / distances).sum(-1) * (_STEP / math.sqrt(math.pi))


def _slopes(mean: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of E||w|| in mean and scale, (rows, n) each, less what r alone would give, which is known."""
    root, distances, widths, transform = _transform(mean, scale)
    limit = torch.exp(-_nodes(mean).mul(2.0).exp()).unsqueeze(-1)
    times, factor = distances.square().unsqueeze(-1), distances.unsqueeze(-1) * (2.0 * _STEP / math.sqrt(math.pi))
    damped = transform.unsqueeze(-1) / widths
    in_mean = ((damped - limit) * factor).sum(-2)
    in_scale = ((damped * (1.0 - 2.0 * times * mean.square().unsqueeze(-2) / widths) - limit) * factor).sum(-2)
    return mean * (1.0 / root + in_mean), scale * (1.0 / root + in_scale)
