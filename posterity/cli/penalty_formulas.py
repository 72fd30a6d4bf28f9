"""Priors, and the KL to them, in one line of plain text."""

import math

import torch

from posterity.priors import Cauchy, GroupLasso, Horseshoe, Laplace, Logistic, Normal, Prior, StudentT
from posterity.priors.penalty import Penalty, Verdict
from posterity.priors.penalty.inversion.expansion import Expansion
from posterity.priors.penalty.inversion.explanation import times
from posterity.priors.penalty.inversion.recognition import recognise_polynomial, recognise_trigonometric

ENTROPY = "log(sigma sqrt(2 pi e))"


def name_of(prior: Prior) -> str:
    """What people call the prior, with its numbers."""
    if isinstance(prior, Normal):
        return f"normal, mean {float(prior.mean):.6g}, scale {float(prior.scale):.6g}"
    if isinstance(prior, GroupLasso):
        return f"of the group lasso over {prior.over}, rate {float(prior.rate):.6g}"
    if isinstance(prior, StudentT):
        return f"Student-t, {prior.degrees:g} degrees, scale {float(prior.scale):.6g}"
    if isinstance(prior, (Laplace, Cauchy, Logistic, Horseshoe)):
        return f"{type(prior).__name__}, scale {float(prior.scale):.6g}"
    return "without a name, by a table"


def density_of(prior: Prior) -> str | None:
    """p(w) of a prior with a name; None of one without."""
    if isinstance(prior, Normal):
        scale, mean = float(prior.scale), float(prior.mean)
        shifted = "w" if mean == 0.0 else f"(w {'-' if mean > 0.0 else '+'} {abs(mean):.6g})"
        return f"exp(-{shifted}^2{_over(2.0 * scale**2)}){_over(scale * math.sqrt(2.0 * math.pi))}"
    if isinstance(prior, GroupLasso):
        return f"exp(-{times(float(prior.rate))}||w_g||) / Z for each group g"
    if isinstance(prior, Horseshoe):
        return f"mean over s of N(w; 0, ({float(prior.scale):.6g} s)^2), s half-Cauchy of scale 1"
    if not isinstance(prior, (Laplace, StudentT, Cauchy, Logistic)):
        return None
    scale = float(prior.scale)
    if isinstance(prior, Laplace):
        return f"exp(-|w|{_over(scale)}){_over(2.0 * scale)}"
    if isinstance(prior, Cauchy):
        return f"1 / ({math.pi * scale:.6g} (1 + {_square(scale)}))"
    if isinstance(prior, StudentT):
        df = prior.degrees
        return f"(1 + {_square(scale)}{_over(df)})^(-{(df + 1.0) / 2.0:g}) / Z"
    return f"1 / ({4.0 * scale:.6g} cosh(w{_over(2.0 * scale)})^2)"


def density_of_verdict(penalty: Penalty, verdict: Verdict, *, points: bool) -> str | None:
    """p(w) of the prior that was found, spelt out where it is known; None where it is only a table, or none."""
    if verdict.prior is None:
        return None
    known = density_of(verdict.prior)
    if known is not None:
        return known
    if points:
        if not 0.0 < verdict.kappa < math.inf:
            return f"exp({verdict.K:.6g} - r(w)) with r = {penalty}"
        return f"exp(-r(w)) / {verdict.kappa:.6g} with r = {penalty}"
    if verdict.route in ("spline", "fourier"):
        return None
    places = torch.linspace(-4.0, 4.0, 161, dtype=torch.float64, device="cpu")
    recognise = recognise_polynomial if verdict.route == "polynomial" else recognise_trigonometric
    found = recognise(places, verdict.log_alpha(places))
    return None if found is None else f"exp({_sum(found)})"


def divergence_from(prior: Prior) -> str:
    """KL(N(mu, sigma^2) || prior) of one weight (of one group, for the group lasso)."""
    if isinstance(prior, Normal):
        scale, mean = float(prior.scale), float(prior.mean)
        shifted = "mu" if mean == 0.0 else f"(mu {'-' if mean > 0.0 else '+'} {abs(mean):.6g})"
        return f"log({scale:.6g} / sigma) + (sigma^2 + {shifted}^2){_over(2.0 * scale**2)} - 1/2"
    if isinstance(prior, Laplace):
        scale = float(prior.scale)
        expected = "E|w| = sigma sqrt(2/pi) exp(-mu^2 / (2 sigma^2)) + mu erf(mu / (sigma sqrt(2)))"
        size = f"{2.0 * scale:.6g}"
        return f"{times(1.0 / scale)}E|w|{'' if size == '1' else f' + log({size})'} - {ENTROPY}, {expected}"
    if isinstance(prior, GroupLasso):
        return f"{times(float(prior.rate))}E||w_g|| + log Z - n {ENTROPY} for each group of n weights"
    return f"-E log p(w) - {ENTROPY}, the expectation by quadrature"


def _over(number: float) -> str:
    """A divisor after something, and nothing for 1."""
    return "" if f"{number:.6g}" == "1" else f" / {number:.6g}"


def _square(scale: float) -> str:
    """(w / scale)^2."""
    return f"(w{over})^2" if (over := _over(scale)) else "w^2"


def _sum(expansion: Expansion) -> str:
    """A polynomial with waves, highest power first."""
    terms = [
        (value, "" if power == 0 else "w" if power == 1 else f"w^{power}")
        for power, value in reversed(list(enumerate(expansion.coefficients)))
    ]
    for frequency, cosine, sine in zip(expansion.frequencies, expansion.cosines, expansion.sines, strict=True):
        inside = "w" if f"{frequency:.6g}" == "1" else f"{frequency:.6g} w"
        terms[-1:-1] = [(cosine, f"cos({inside})"), (sine, f"sin({inside})")]
    largest = max(abs(value) for value, _ in terms)
    text = ""
    for value, what in terms:
        if abs(value) < 1e-10 * largest:  # rounding
            continue
        size = f"{abs(value):.6g}"
        term = what if what and size == "1" else f"{size} {what}".rstrip()
        text += f" {'-' if value < 0.0 else '+'} {term}" if text else f"{'-' if value < 0.0 else ''}{term}"
    return text
