"""Expansions of penalties in functions with known inverses: polynomials and waves."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from posterity.penalties.families import Family


@dataclass(frozen=True)
class Expansion:
    """f(t) = sum_n coefficients[n] t^n + sum_j cosines[j] cos(frequencies[j] t) + sines[j] sin(frequencies[j] t)."""

    coefficients: tuple[float, ...] = (0.0,)
    frequencies: tuple[float, ...] = ()
    cosines: tuple[float, ...] = ()
    sines: tuple[float, ...] = ()

    def __call__(self, t: Tensor) -> Tensor:
        """f(t), (...) -> (...)."""
        value = torch.zeros_like(t)
        for coefficient in reversed(self.coefficients):
            value = value * t + coefficient
        for frequency, cosine, sine in zip(self.frequencies, self.cosines, self.sines, strict=True):
            value = value + cosine * torch.cos(frequency * t) + sine * torch.sin(frequency * t)
        return value


@dataclass(frozen=True)
class Member:
    """X ~ beta_{0, nu} of `family` at nu = `scale`, in float64.

    r(mu) = -entropy - E log alpha(mu + X). The convolution is with the reflection of the density of X, which is what
    an expectation over mu + X is (theory 002-05; without it a skewed family gives another prior).
    """

    family: Family
    scale: float

    @property
    def entropy(self) -> float:
        """-E log beta_0(X), in nats."""
        return self.family.entropy(self.scale)

    @property
    def spread(self) -> float:
        """The standard deviation of X."""
        _, first, second = self.moments(2).tolist()
        return math.sqrt(second - first**2)

    def moments(self, order: int) -> Tensor:
        """E X^n for n = 0 ... order, (order + 1,) on the CPU."""
        return torch.tensor(self.family.moments(self.scale, order), dtype=torch.float64, device="cpu")

    def characteristic(self, frequency: Tensor) -> Tensor:
        """E exp(i k X) for frequencies k (...), complex (...)."""
        return self.family.characteristic(frequency, self.scale)

    def gain(self, frequency: Tensor) -> Tensor:
        """1 / |E exp(i k X)|: by how much inverting multiplies what r has at frequency k, (...) -> (...)."""
        return self.characteristic(frequency).abs().reciprocal()

    def nodes(self) -> tuple[Tensor, Tensor]:
        """Points x and weights of sum 1, (Q,) each, with E f(X) = the sum of weights times f(x)."""
        return self.family.nodes(self.scale)

    def smooth(self, function: Callable[[Tensor], Tensor], mu: Tensor) -> Tensor:
        """E f(mu + X), (N,) -> (N,), by the nodes."""
        points, weights = (part.to(mu.device) for part in self.nodes())
        return function(mu.unsqueeze(-1) + points) @ weights

    def finer_nodes(self) -> tuple[Tensor, Tensor] | None:
        """Other nodes, to check by; None where there is no need."""
        return self.family.finer_nodes(self.scale)


def smooth_polynomial(coefficients: Sequence[float], member: Member) -> tuple[float, ...]:
    """Coefficients, by increasing degree, of mu -> E p(mu + X)."""
    degree = len(coefficients) - 1
    moments = member.moments(degree).tolist()
    return tuple(
        math.fsum(math.comb(n, m) * moments[n - m] * coefficients[n] for n in range(m, degree + 1))
        for m in range(degree + 1)
    )


def invert_polynomial(coefficients: Sequence[float], member: Member) -> tuple[float, ...]:
    """Coefficients of the polynomial g with E g(mu + X) = p(mu): the only one, of the same degree.

    The coefficient of mu^(n-k) in E (mu + X)^n is C(n, k) E X^k, so the system is triangular and is solved from the
    highest degree down. For normal X the result is Hermite's: mu^n becomes sigma^n He_n(t / sigma).

    >>> from posterity.penalties.families import Gaussian
    >>> invert_polynomial((0.0, 0.0, 0.0, 0.0, 1.0), Member(Gaussian(1.0), 1.0))
    (3.0, 0.0, -6.0, 0.0, 1.0)
    """
    degree = len(coefficients) - 1
    moments = member.moments(degree).tolist()
    inverse = [0.0] * (degree + 1)
    for m in range(degree, -1, -1):
        inverse[m] = math.fsum(
            [coefficients[m], *(-math.comb(n, m) * moments[n - m] * inverse[n] for n in range(m + 1, degree + 1))]
        )
    return tuple(inverse)


def smooth_expansion(expansion: Expansion, member: Member) -> Expansion:
    """mu -> E f(mu + X)."""
    return _times(expansion, smooth_polynomial(expansion.coefficients, member), _factors(expansion, member))


def invert_expansion(expansion: Expansion, member: Member) -> Expansion:
    """The g of the same form with E g(mu + X) = f(mu).

    With c cos(k mu) + s sin(k mu) = Re[(c - i s) exp(i k mu)], smoothing multiplies c - i s by E exp(i k X) and the
    inverse divides by it; `ValueError` where that is zero, as it may be for densities with edges.

    >>> from posterity.penalties.families import Gaussian
    >>> invert_expansion(Expansion((0.0,), (2.0,), (1.0,), (0.0,)), Member(Gaussian(0.5), 0.5)).cosines
    (1.6487212707001282,)
    """
    factors = _factors(expansion, member)
    for frequency, factor in zip(expansion.frequencies, factors.abs().tolist(), strict=True):
        if factor < 1e-300:
            raise ValueError(
                f"The family smooths the frequency {frequency:.6g} away altogether: no prior gives a penalty with it."
            )
    return _times(expansion, invert_polynomial(expansion.coefficients, member), factors.reciprocal())


def _factors(expansion: Expansion, member: Member) -> Tensor:
    """E exp(i k X) at the expansion's frequencies, complex (J,); moments alone suffice where there are none."""
    if not expansion.frequencies:
        return torch.zeros(0, dtype=torch.complex128, device="cpu")
    return member.characteristic(torch.tensor(expansion.frequencies, dtype=torch.float64, device="cpu"))


def _times(expansion: Expansion, coefficients: tuple[float, ...], factors: Tensor) -> Expansion:
    """The expansion with another polynomial and each amplitude c - i s times its factor."""
    amplitudes = [
        complex(cosine, -sine) * factor
        for cosine, sine, factor in zip(expansion.cosines, expansion.sines, factors.tolist(), strict=True)
    ]
    cosines, sines = tuple(value.real for value in amplitudes), tuple(-value.imag for value in amplitudes)
    return Expansion(coefficients, expansion.frequencies, cosines, sines)


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
    amplitudes = list(map(math.hypot, potential.cosines, potential.sines))
    waves = sum(amplitudes)
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
    waving = sum(k**2 * amplitude for k, amplitude in zip(potential.frequencies, amplitudes, strict=True))
    bend = waving + float(curvature(likely).abs().max())  # a peak of exp(A) is as wide as its -1/2
    points = min(max(_POINTS, math.ceil(4.0 * (upper - low) * math.sqrt(bend))), _MOST_POINTS)
    return _log_integral(potential, low, upper, points)


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
