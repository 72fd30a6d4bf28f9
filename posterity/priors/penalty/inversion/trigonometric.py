"""Cosines and sines: the expectation over mu + X multiplies each by the characteristic function (theory 002-12)."""

import torch
from torch import Tensor

from posterity.priors.penalty.inversion.expansion import Expansion
from posterity.priors.penalty.inversion.member import Member
from posterity.priors.penalty.inversion.polynomial import invert_polynomial, smooth_polynomial


def smooth_expansion(expansion: Expansion, member: Member) -> Expansion:
    """mu -> E f(mu + X)."""
    factors = _factors(expansion, member)
    return _times(expansion, smooth_polynomial(expansion.coefficients, member), factors)


def invert_expansion(expansion: Expansion, member: Member) -> Expansion:
    """The g of the same form with E g(mu + X) = f(mu).

    With c cos(k mu) + s sin(k mu) = Re[(c - i s) exp(i k mu)], smoothing multiplies c - i s by E exp(i k X) and the
    inverse divides by it; `ValueError` where that is zero, as it may be for densities with edges.

    >>> from posterity.priors.penalty.families import Gaussian
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
