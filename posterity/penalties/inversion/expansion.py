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
    found = [0.0] * (degree + 1)
    for m in range(degree, -1, -1):
        found[m] = math.fsum(
            [coefficients[m], *(-math.comb(n, m) * moments[n - m] * found[n] for n in range(m + 1, degree + 1))]
        )
    return tuple(found)


def smooth_expansion(expansion: Expansion, member: Member) -> Expansion:
    """mu -> E f(mu + X)."""
    factors = _factors(expansion, member)
    return _times(expansion, smooth_polynomial(expansion.coefficients, member), factors)


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
