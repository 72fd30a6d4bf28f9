"""Whether values on a grid are a polynomial with cosines, to the last digits: then they are inverted exactly."""

import math

import numpy as np
import torch
from torch import Tensor

from posterity.priors.penalty.inversion.expansion import Expansion

_ROUNDING = 1e-12  # of the largest value: a fit as close as this is taken for an identity
_HIGHEST_DEGREE = 12
_DEGREE_WITH_COSINES = 6
_MOST_FREQUENCIES = 3
_ITERATIONS = 30


def recognise_polynomial(mu: Tensor, values: Tensor, rounding: float = 0.0) -> Expansion | None:
    """The polynomial of least degree (at most 12) through values (N,) at mu (N,), or None where there is none.

    `rounding` is what the values have lost already.
    """
    allowed = _ROUNDING * float(values.abs().max()) + rounding
    for degree in range(min(_HIGHEST_DEGREE, len(mu) // 4) + 1):
        fitted = fit_expansion(mu, values, degree, ())
        if float((fitted(mu) - values).abs().max()) <= allowed:
            return _without_rounding(mu, values, fitted, allowed)
    return None


def recognise_trigonometric(mu: Tensor, values: Tensor, rounding: float = 0.0) -> Expansion | None:
    """The polynomial (degree at most 6) with up to three cosines and sines through values (N,), or None.

    Frequencies are found one by one, each where the spectrum of what is left is highest, and then refined together by
    Gauss-Newton steps on all parameters. `rounding` is what the values have lost already.
    """
    allowed = _ROUNDING * float(values.abs().max()) + rounding
    frequencies: tuple[float, ...] = ()
    for _ in range(_MOST_FREQUENCIES):
        frequencies = _refined(mu, values, (*frequencies, _strongest(mu, values, frequencies)))
        if len(set(frequencies)) < len(frequencies) or min(frequencies) <= 0.0:
            return None
        fitted = fit_expansion(mu, values, _DEGREE_WITH_COSINES, frequencies)
        if float((fitted(mu) - values).abs().max()) <= allowed:
            return _without_rounding(mu, values, fitted, allowed)
    return None


def fit_expansion(mu: Tensor, values: Tensor, degree: int, frequencies: tuple[float, ...]) -> Expansion:
    """Least squares on the powers up to `degree` and these frequencies, values (N,) at mu (N,)."""
    design = _design(mu, degree, frequencies)
    solution = torch.linalg.lstsq(design, values.unsqueeze(-1), driver="gelsd").solution.squeeze(-1)
    domain = [float(mu.min()), float(mu.max())]
    powers = np.polynomial.Chebyshev(solution[: degree + 1].numpy(), domain=domain).convert(
        kind=np.polynomial.Polynomial
    )
    coefficients = np.zeros(degree + 1)
    coefficients[: len(powers.coef)] = powers.coef  # the conversion drops zeros at the end
    cosines, sines = solution[degree + 1 :].reshape(2, -1).tolist()
    return Expansion(tuple(coefficients.tolist()), frequencies, tuple(cosines), tuple(sines))


def _design(mu: Tensor, degree: int, frequencies: tuple[float, ...]) -> Tensor:
    """Chebyshev polynomials, cosines, sines: (N, degree + 1 + 2 J)."""
    local = (2.0 * mu - mu.min() - mu.max()) / (mu.max() - mu.min())
    angles = local.clamp(-1.0, 1.0).arccos().unsqueeze(-1)
    phases = mu.unsqueeze(-1) * torch.tensor(frequencies, dtype=torch.float64, device="cpu")
    return torch.cat([torch.cos(angles * torch.arange(degree + 1, device="cpu")), phases.cos(), phases.sin()], dim=-1)


def _without_rounding(mu: Tensor, values: Tensor, fitted: Expansion, allowed: float) -> Expansion:
    """Without terms that are mere rounding, where it stays as close: a trace of mu^6 would rule the tails."""
    reach = float(mu.abs().max())
    coefficients = [
        0.0 if abs(value) * reach**power <= 100.0 * allowed else value
        for power, value in enumerate(fitted.coefficients)
    ]
    while len(coefficients) > 1 and coefficients[-1] == 0.0:
        coefficients.pop()
    simpler = fit_expansion(mu, values, len(coefficients) - 1, fitted.frequencies)
    kept = tuple(new if old != 0.0 else 0.0 for new, old in zip(simpler.coefficients, coefficients, strict=True))
    simpler = Expansion(kept, simpler.frequencies, simpler.cosines, simpler.sines)
    return simpler if float((simpler(mu) - values).abs().max()) <= 2.0 * allowed else fitted


def _strongest(mu: Tensor, values: Tensor, frequencies: tuple[float, ...]) -> float:
    """The frequency at which there is most in what polynomial and frequencies leave."""
    orthogonal = torch.linalg.qr(_design(mu, _DEGREE_WITH_COSINES, frequencies)).Q
    left = values - orthogonal @ (orthogonal.mT @ values)
    size, length, spacing = 8 * len(mu), float(mu[-1] - mu[0]), float(mu[1] - mu[0])
    tried = 2.0 * math.pi * torch.fft.rfftfreq(size, d=spacing, dtype=torch.float64, device="cpu")
    power = torch.where(tried > 1.5 * math.pi / length, torch.fft.rfft(left, n=size).abs(), 0.0)
    return float(tried[power.argmax()])


def _refined(mu: Tensor, values: Tensor, frequencies: tuple[float, ...]) -> tuple[float, ...]:
    """The frequencies after Gauss-Newton steps on them and all amplitudes."""
    count = len(frequencies)
    for _ in range(_ITERATIONS):
        fitted = fit_expansion(mu, values, _DEGREE_WITH_COSINES, frequencies)
        phases = mu.unsqueeze(-1) * torch.tensor(frequencies, dtype=torch.float64, device="cpu")
        cosines, sines = (
            torch.tensor(part, dtype=torch.float64, device="cpu") for part in (fitted.cosines, fitted.sines)
        )
        slopes = mu.unsqueeze(-1) * (sines * phases.cos() - cosines * phases.sin())  # (N, J)
        design = torch.cat([_design(mu, _DEGREE_WITH_COSINES, frequencies), slopes], dim=-1)
        left = (values - fitted(mu)).unsqueeze(-1)
        change = torch.linalg.lstsq(design, left, driver="gelsd").solution[-count:, 0].tolist()
        frequencies = tuple(old + new for old, new in zip(frequencies, change, strict=True))
        if not all(map(math.isfinite, frequencies)):
            return (0.0,) * count
        if max(abs(new / old) if old else 1.0 for old, new in zip(frequencies, change, strict=True)) < 1e-14:
            break
    return frequencies
