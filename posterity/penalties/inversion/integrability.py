"""kappa, the integral of exp(A) over the line, or that there is none."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from posterity.penalties.inversion.expansion import Expansion

_POINTS, _MOST_POINTS = 4001, 400001
_NATS = 60.0  # below the maximum: what is lower changes no digit
_HEAVIEST = 1.0 / 1.1  # 1 / p of the heaviest power law that counts as integrable
_LEAST_FALL = 1e-9  # nats over an eighth of the interval: less is rounding
_OUTER = 0.25  # of the interval at either end, from which its tail is judged


def expansion_log_kappa(potential: Expansion) -> float:
    """log of the integral of exp(A) for A a polynomial with cosines; inf unless A falls on both sides."""
    coefficients = list(potential.coefficients)
    while len(coefficients) > 1 and coefficients[-1] == 0.0:
        coefficients.pop()
    degree, leading = len(coefficients) - 1, coefficients[-1]
    if degree == 0 or degree % 2 == 1 or leading > 0.0:
        return math.inf
    waves = sum(math.hypot(*pair) for _, *pair in _waves(potential))
    lower = [abs(value) for value in coefficients[:-1]]
    lower[0] += 2.0 * waves + _NATS
    # Beyond this the leading term outweighs all others together, so that A is far below its value at 0.
    reach = max((2.0 * degree * value / -leading) ** (1.0 / (degree - n)) for n, value in enumerate(lower))
    grid = torch.linspace(-reach, reach, _POINTS, dtype=torch.float64, device="cpu")
    values = potential(grid)
    likely = grid[values >= values.max() - 2.0 * waves - _NATS]
    spacing = 2.0 * reach / (_POINTS - 1)
    low, upper = float(likely.min()) - spacing, float(likely.max()) + spacing
    curvature = Expansion(tuple(n * (n - 1) * value for n, value in enumerate(coefficients))[2:])
    waving = sum(k**2 * math.hypot(*pair) for k, *pair in _waves(potential))
    bend = waving + float(curvature(likely).abs().max())  # a peak of exp(A) is as wide as its -1/2
    points = min(max(_POINTS, math.ceil(4.0 * (upper - low) * math.sqrt(bend))), _MOST_POINTS)
    return _log_integral(potential, low, upper, points)


def _waves(potential: Expansion) -> list[tuple[float, float, float]]:
    """(frequency, cosine, sine) of each wave."""
    return list(zip(potential.frequencies, potential.cosines, potential.sines, strict=True))


def grid_log_kappa(potential: Callable[[Tensor], Tensor], low: float, high: float) -> float:
    """log of the integral of exp(A) for A known on [low, high] alone, with a guess at both tails.

    The tails are judged by the outward slopes over the two halves of the outer quarter. A that does not fall there has
    no finite integral. Where it falls ever more slowly it is read as a power law, A = -p log(t - c), whose -1 / A' is
    linear in t with slope 1 / p, and which has an integral for p > 1 only (here p > 1.1: nearer to 1 it cannot
    be told); else as a Gaussian tail.
    """
    pieces = [_log_integral(potential, low, high)]
    half = 0.5 * _OUTER * (high - low)
    outward = torch.linspace(-1.0, 0.0, 51, dtype=torch.float64, device="cpu") * half
    centred = outward - outward.mean()
    for end, sign in ((low, -1.0), (high, 1.0)):
        outer, inner = (
            float((centred * potential(end + sign * (outward - shift))).sum() / centred.square().sum())
            for shift in (0.0, half)
        )
        value = float(potential(torch.tensor([end], dtype=torch.float64, device="cpu")))
        pieces.append(value + _log_tail(outer, inner, half))
    return float(torch.logsumexp(torch.tensor(pieces, dtype=torch.float64, device="cpu"), dim=0))


def _log_tail(outer: float, inner: float, half: float) -> float:
    """log of the integral beyond an end of exp(A - A(end)), by the slopes of A half a `half` and 1.5 of it before."""
    if outer * half >= -_LEAST_FALL:
        return math.inf
    if inner < outer:
        inverse_power = (1.0 / inner - 1.0 / outer) / half
        distance = -1.0 / outer + 0.5 * half * inverse_power  # -1 / A' at the end
        return math.log(distance / (1.0 - inverse_power)) if inverse_power < _HEAVIEST else math.inf
    curvature = (inner - outer) / half
    slope = -outer + 0.5 * half * curvature  # -A' at the end
    if curvature < 1e-9 * slope**2:
        return -math.log(slope)
    scale = 1.0 / math.sqrt(curvature)
    mills = torch.special.erfcx(torch.tensor(slope * scale / math.sqrt(2.0), dtype=torch.float64, device="cpu"))
    return math.log(scale * math.sqrt(0.5 * math.pi) * float(mills))


def _log_integral(potential: Callable[[Tensor], Tensor], low: float, high: float, points: int = _POINTS) -> float:
    """log of the integral of exp(A) over [low, high] by the trapezoid rule."""
    grid = torch.linspace(low, high, points, dtype=torch.float64, device="cpu")
    values = potential(grid)
    values[0], values[-1] = values[0] - math.log(2.0), values[-1] - math.log(2.0)
    return float(torch.logsumexp(values, dim=0)) + math.log((high - low) / (points - 1))
