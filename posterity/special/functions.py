"""Special functions: incomplete beta, entropies, complex logarithm, exponential integral, Faddeeva, expected norms."""

import math
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

_NODES = 128  # of the Gauss-Legendre rule on each side of the mode
_STEPS = 60  # bisection alone would converge by then; Newton takes about five
_BUDGET = 2**20  # numbers held at once


def beta_quantile(p: float, a: Tensor, b: Tensor) -> Tensor:
    """Return the p-quantile of Beta(a, b), entry by entry: tensors (...) of at least 1 -> (...), in float64.

    In u = logit x the density exp(a u - (a + b) log(1 + e^u)) / B(a, b) is smooth and log-concave for all a and b, so
    a Gauss-Legendre rule over its mass gives the distribution function to rounding, and safeguarded Newton steps invert
    it.

    >>> beta_quantile(0.25, torch.tensor([1.0, 2.0]), torch.tensor(1.0))  # x = p and x^2 = p
    tensor([0.2500, 0.5000], dtype=torch.float64)
    """
    a, b = torch.broadcast_tensors(a.to(torch.float64), b.to(torch.float64))  # type: ignore[no-untyped-call]
    rows = max(1, _BUDGET // _NODES)
    pieces = zip(torch.split(a.reshape(-1), rows), torch.split(b.reshape(-1), rows), strict=True)
    return torch.cat([_quantile(p, *piece) for piece in pieces]).reshape(a.shape)


def _quantile(p: float, a: Tensor, b: Tensor) -> Tensor:
    mode = a.log() - b.log()  # of u
    nodes, weights = (values.to(a.device)[:, None] for values in _rule())

    def height(u: Tensor) -> Tensor:
        """Return the density of u, up to a constant: 1 at the mode."""
        rest = F.softplus(u) - F.softplus(mode)
        return (a * (u - mode) - (a + b) * rest).exp()

    def area(u: Tensor) -> Tensor:
        """Integrate `height` from the mode to u."""
        return (weights * height(mode + nodes * (u - mode))).sum(0) * (u - mode)

    scale = (torch.polygamma(1, a) + torch.polygamma(1, b)).sqrt()
    low = mode - (12.0 + 30.0 / a.sqrt()) * scale  # beyond, the tail exp(a u) and its mirror image have no mass
    high = mode + (12.0 + 30.0 / b.sqrt()) * scale
    below = -area(low)
    wanted = p * (below + area(high)) - below
    u = mode + scale * torch.special.ndtri(torch.tensor(p, dtype=torch.float64, device=a.device))
    for _ in range(_STEPS):
        miss = area(u) - wanted
        low, high = torch.where(miss < 0, u, low), torch.where(miss < 0, high, u)
        step = u - miss / height(u)
        new = torch.where((step >= low) & (step <= high), step, 0.5 * (low + high))
        moved, u = (new - u).abs(), new
        if bool((moved <= 1e-7 * scale).all()):  # the error is about the square of this
            break
    return torch.sigmoid(u)


@cache
def _rule() -> tuple[Tensor, Tensor]:
    """Return nodes and weights of the Gauss-Legendre rule on (0, 1)."""
    nodes, weights = np.polynomial.legendre.leggauss(_NODES)
    return torch.from_numpy(0.5 * (nodes + 1.0)), torch.from_numpy(0.5 * weights)


def binary_entropy(logit: Tensor) -> Tensor:
    """Return -p log p - (1 - p) log(1 - p) in nats, for p = sigmoid(logit); finite at any logit.

    >>> binary_entropy(torch.tensor([0.0, 200.0])).abs()
    tensor([0.6931, 0.0000])
    """
    p = torch.sigmoid(logit)
    return -(p * F.logsigmoid(logit) + (1.0 - p) * F.logsigmoid(-logit))


def complex_expm1(real: Tensor, imaginary: Tensor) -> Tensor:
    """Return exp(x + i y) - 1, complex, from the real and imaginary parts.

    >>> complex_expm1(torch.tensor(0.0), torch.tensor(1e-6)).real
    tensor(-5.0000e-13)
    """
    growth = torch.expm1(real)
    cosine = growth * imaginary.cos() - 2.0 * (0.5 * imaginary).sin().square()
    return torch.complex(cosine, (growth + 1.0) * imaginary.sin())


def complex_log1p(values: Tensor) -> Tensor:
    """Return log(1 + z), complex, accurate near z = 0; at z = -1, where it is infinite, the log of 1e-150.

    >>> complex_log1p(torch.tensor(1e-9j)).imag
    tensor(1.0000e-09)
    """
    x, y = values.real, values.imag
    near = x.square() + y.square() < 0.25
    excess = torch.where(near, 2.0 * x + x.square() + y.square(), torch.zeros_like(x))
    size = torch.where(near, torch.ones_like(x), (1.0 + x).square() + y.square()).clamp_min(1e-300)
    return torch.complex(0.5 * (torch.log1p(excess) + torch.log(size)), torch.atan2(y, 1.0 + x))


_EULER = 0.57721566490153286
_BORDER = 3.0  # below: the power series; above: the continued fraction
_SERIES_TERMS = 28  # of the series: the next one is below 1e-17 at the border
_DEPTH = 30  # of the fraction: its error is below 1e-13 at the border


def scaled_exponential_integral(values: Tensor, order: int = 1) -> Tensor:
    """Return G_n(x) = e^x E_n(x) = integral over s > 0 of e^(-x s) (1 + s)^(-n), for x >= 0 and order n >= 1.

    G_1 is infinite at 0, where it behaves as -log x - 0.5772, and falls as 1 / x. It is computed in float64 to a
    relative error of 1e-12 and differentiable to any order: G_1' = G_1 - 1/x, and G_n' = G_n - G_(n-1).

    >>> round(scaled_exponential_integral(torch.tensor(1.0)).item(), 5)
    0.59635
    """
    result: Tensor = _Scaled.apply(values, order)  # type: ignore[no-untyped-call]
    return result


class _Scaled(torch.autograd.Function):
    """The function G_n with derivatives that are accurate near zero and at infinity."""

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
    """Sum E_1(x) = -gamma - log x + sum over k of (-1)^(k+1) x^k / (k k!); then (n - 1) E_n = e^-x - x E_(n-1)."""
    total = torch.zeros_like(values)
    for k in range(_SERIES_TERMS, 0, -1):
        total.add_((-1.0) ** (k + 1) / (k * math.factorial(k))).mul_(values)
    result = values.exp() * (total - values.log() - _EULER)
    for n in range(2, order + 1):
        # x G_1 is 0 at 0, where G_1 is infinite
        result = (1.0 - torch.where(values > 0.0, values * result, torch.zeros_like(values))) / (n - 1)
    return result


def _far(values: Tensor, order: int) -> Tensor:
    """Evaluate the continued fraction G_n(x) = 1 / (x + n - 1 n / (x + n + 2 - 2 (n + 1) / (x + n + 4 - ...)))."""
    tail = values + (order + 2 * _DEPTH)
    for k in range(_DEPTH, 0, -1):
        tail.reciprocal_().mul_(-k * (order + k - 1)).add_(values).add_(order + 2 * (k - 1))
    return 1.0 / tail


_FADDEEVA_TERMS = 12  # of each sum: the first that is left out is below 1e-16
_FADDEEVA_STEP = math.sqrt(math.pi / _FADDEEVA_TERMS)  # where the errors of step and truncation are alike


def faddeeva(values: Tensor) -> Tensor:
    """w(z) = e^(-z^2) erfc(-i z), complex entry by entry: erfc(z) = e^(-z^2) w(i z).

    It is computed in complex128 to a relative error of 1e-13 in the upper half plane, where |w| <= 1, and is
    differentiable to any order: w' = -2 z w + 2i / sqrt(pi). Below the real axis w = 2 e^(-z^2) - w(-z) grows, and has
    zeros near which the error is relative to the two terms.

    **Math**: w(z) = (2 i z / pi) times the integral of e^(-t^2) / (z^2 - t^2) over t > 0, by the trapezoid or the
    midpoint rule of step h, whose error is known: near the real axis it is the residue at the pole t = z, which is
    added. The rule whose nodes are farther from z is used.

    **References**: Al Azah and Chandler-Wilde (2021), Computation of the complex error function using modified
    trapezoidal rules.

    >>> faddeeva(torch.tensor([0.0 + 0.0j, 1.0j]))
    tensor([1.0000+0.j, 0.4276+0.j])
    """
    result: Tensor = _Faddeeva.apply(values)  # type: ignore[no-untyped-call]
    return result


class _Faddeeva(torch.autograd.Function):
    """The function w with its derivative, which is computed from w."""

    generate_vmap_rule = True

    @staticmethod
    def forward(values: Tensor) -> Tensor:
        exact = values.to(torch.complex128)
        upper = torch.where(exact.imag < 0.0, -exact, exact)
        # w(-conj z) = conj w(z): the first quadrant is enough
        quadrant = torch.complex(upper.real.abs(), upper.imag)
        result = _first_quadrant(quadrant)
        result = torch.where(upper.real < 0.0, result.conj(), result)
        reflected = 2.0 * torch.exp(-exact.square()) - result
        dtype = torch.complex64 if values.dtype in (torch.float32, torch.complex64) else torch.complex128
        return torch.where(exact.imag < 0.0, reflected, result).to(dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (values,) = ctx.saved_tensors
        slope = -2.0 * values * faddeeva(values) + 2.0j / math.sqrt(math.pi)
        result: Tensor = grads[0] * slope.conj()
        return result if values.is_complex() else result.real


def _first_quadrant(values: Tensor) -> Tensor:
    """Return w at z = x + i y with x, y >= 0."""
    x, y = values.real, values.imag
    offset = (x / _FADDEEVA_STEP) % 1.0
    plain = y >= torch.clamp(x, min=math.pi / _FADDEEVA_STEP)
    trapezoid = ~plain & (y < x) & (offset >= 0.25) & (offset <= 0.75)
    # Each rule is evaluated everywhere, at a harmless point where another rule applies.
    safe = torch.full_like(values, complex(0.0, 1.0))
    at_midpoints, at_nodes = torch.where(trapezoid, safe, values), torch.where(trapezoid, values, safe)
    midpoint = _sum(at_midpoints, 0.5) + torch.where(plain, torch.zeros_like(values), _residue(at_midpoints, 1.0))
    even = 1.0j * _FADDEEVA_STEP / (math.pi * at_nodes) + _sum(at_nodes, 1.0) + _residue(at_nodes, -1.0)
    return torch.where(trapezoid, even, midpoint)


def _sum(values: Tensor, first: float) -> Tensor:
    """Return (2 i h z / pi) sum over k of e^(-t_k^2) / (z^2 - t_k^2) at t_k = (k + first) h."""
    squares, total = values.square(), torch.zeros_like(values)
    for k in range(_FADDEEVA_TERMS):
        node = ((k + first) * _FADDEEVA_STEP) ** 2
        total = total + math.exp(-node) / (squares - node)
    return (2.0j * _FADDEEVA_STEP / math.pi) * values * total


def _residue(values: Tensor, sign: float) -> Tensor:
    """Return 2 e^(-z^2) / (1 + sign e^(-2 pi i z / h)), without overflow at large y."""
    phase = 2.0j * math.pi * values / _FADDEEVA_STEP  # Re <= 0
    return 2.0 * torch.exp(phase - values.square()) / (phase.exp() + sign)


_START, _STOP, _STEP = -7.5, 11.0, 0.25  # nodes v = log(u r) of the rule in `expected_norm`


def expected_absolute(mean: Tensor, scale: Tensor) -> Tensor:
    """Return E|w| for w ~ N(mean, scale^2), entry by entry.

    The formula is scale sqrt(2 / pi) exp(-mean^2 / (2 scale^2)) + mean erf(mean / (scale sqrt(2))).

    >>> expected_absolute(torch.tensor([0.0, 3.0]), torch.tensor([1.0, 0.1]))
    tensor([0.7979, 3.0000])
    """
    ratio = mean / scale
    density = math.sqrt(2.0 / math.pi) * torch.exp(-0.5 * ratio.square())
    return scale * density + mean * torch.erf(ratio * math.sqrt(0.5))


def expected_norm(mean: Tensor, scale: Tensor) -> Tensor:
    """Return E||w|| for independent w_i ~ N(mean_i, scale_i^2), over the last axis: (..., n) and (..., n) -> (...).

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
    """The integral and its gradient, each by one pass over the nodes; higher derivatives by autograd."""

    generate_vmap_rule = True

    @staticmethod
    def forward(mean: Tensor, scale: Tensor) -> Tensor:
        values = []
        for m, s in _rows(mean, scale):
            root, distances, _, transform = _transform(m, s)
            difference = torch.exp(-_nodes(mean).mul(2.0).exp()) - transform
            values.append(root.squeeze(-1) + (difference / distances).sum(-1) * (_STEP / math.sqrt(math.pi)))
        return torch.cat(values).reshape(mean.shape[:-1]).to(mean.dtype)

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
    """Reshape both to float64 (rows, n), in pieces of bounded memory."""
    size = mean.shape[-1]
    rows = max(1, _BUDGET // (size * len(_nodes(mean))))
    means, scales = (torch.split(value.reshape(-1, size).double(), rows) for value in (mean, scale))
    return list(zip(means, scales, strict=True))


def _nodes(like: Tensor) -> Tensor:
    """Return equidistant nodes v."""
    return torch.arange(_START, _STOP, _STEP, dtype=torch.float64, device=like.device)


def _transform(mean: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return r (rows, 1), u (rows, nodes), 1 + 2 t scale^2 (rows, nodes, n) and M(t) (rows, nodes), with t = u^2."""
    root = (mean.square() + scale.square()).sum(-1, keepdim=True).sqrt().clamp_min(1e-100)
    distances = _nodes(mean).exp() / root
    times = distances.square().unsqueeze(-1)
    widths = 1.0 + 2.0 * times * scale.square().unsqueeze(-2)
    exponents = -0.5 * widths.log() - times * mean.square().unsqueeze(-2) / widths
    return root, distances, widths, exponents.sum(-1).exp()


def _slopes(mean: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of E||w|| in mean and scale, (rows, n) each; the term r is differentiated in closed form."""
    root, distances, widths, transform = _transform(mean, scale)
    limit = torch.exp(-_nodes(mean).mul(2.0).exp()).unsqueeze(-1)
    times, factor = distances.square().unsqueeze(-1), distances.unsqueeze(-1) * (2.0 * _STEP / math.sqrt(math.pi))
    damped = transform.unsqueeze(-1) / widths
    in_mean = ((damped - limit) * factor).sum(-2)
    in_scale = ((damped * (1.0 - 2.0 * times * mean.square().unsqueeze(-2) / widths) - limit) * factor).sum(-2)
    return mean * (1.0 / root + in_mean), scale * (1.0 / root + in_scale)
