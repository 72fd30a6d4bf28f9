"""Verdicts on penalties: recognition of closed forms, findings of an inversion, and explanations in words."""

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from posterity.penalties.expansion import Expansion, Member
from posterity.priors.prior import Prior

Route = Literal["catalogue", "polynomial", "trigonometric", "spline", "fourier"]


@dataclass(frozen=True, eq=False)
class Verdict:
    """The verdict whether a penalty r_nu(mu) is KL(beta_{mu,nu} || alpha) + K for one prior alpha, with that prior.

    `satisfies_star`: there is such a prior (by the routes "spline" and "fourier", which fit: to within `residual`).
    `kappa`: the integral of exp(A), inf where it diverges, nan where there is no one A; `K` = -log kappa, which is
    finite also where kappa is beyond the largest number or below the least.
    `residual`: max |KL + K - r| over the grid. `noise_amplification`: by how much a small error of r grows in log
    alpha (0 where nothing was inverted numerically). `log_alpha`: t (...) -> log alpha(t) (...), normalised where
    kappa is finite (else A itself, or the closest that was found). `prior`: alpha as a prior of this library, where it
    is one of them. `explanation`: the finding in plain words. `nearest`: what to use instead, where there is no prior.
    `decided`: False where none was found, but there may be one (or there is, but beyond all numbers).
    """

    satisfies_star: bool
    kappa: float
    K: float
    residual: float
    noise_amplification: float
    log_alpha: Callable[[Tensor], Tensor]
    prior: Prior | None
    explanation: str
    nearest: object | None
    route: Route
    decided: bool = True

    @property
    def fitted(self) -> bool:
        """Whether it comes from a fit, not from an exact inversion."""
        return self.route in ("spline", "fourier")

    def __str__(self) -> str:
        heading = "is no prior" if self.decided else "may be a prior or none"
        if self.satisfies_star:
            heading = f"is a prior, to within {self.residual:.1g}" if self.fitted else "is a prior"
        kappa = "infinite" if math.isinf(self.K) else f"{self.kappa:.6g}"
        if math.isfinite(self.K) and self.kappa in (0.0, math.inf):
            kappa = f"exp({-self.K:.6g})"
        lines = [
            f"penalty: {heading} ({self.route})",
            f"  {self.explanation}",
            f"  kappa = {kappa}, K = {self.K:.6g}, residual = {self.residual:.2g}, "
            f"noise amplification = {self.noise_amplification:.2g}",
        ]
        if self.prior is not None:
            lines.append(f"  prior: {self.prior}")
        if self.nearest is not None:
            lines.append(f"  nearest: {self.nearest}")
        return "\n".join(lines)


_ROUNDING = 1e-12  # of the largest value: a fit as close as this is taken for an identity
_HIGHEST_DEGREE = 12
_DEGREE_WITH_COSINES = 6
_MOST_FREQUENCIES = 3
_ITERATIONS = 30


def recognise_polynomial(mu: Tensor, values: Tensor, rounding: float = 0.0) -> Expansion | None:
    """The polynomial of least degree (at most 12) through values (N,) at mu (N,), or None; `rounding`: their error."""
    allowed = _ROUNDING * float(values.abs().max()) + rounding
    for degree in range(min(_HIGHEST_DEGREE, len(mu) // 4) + 1):
        fitted = fit_expansion(mu, values, degree, ())
        if float((fitted(mu) - values).abs().max()) <= allowed:
            return _without_rounding(mu, values, fitted, allowed)
    return None


def recognise_trigonometric(mu: Tensor, values: Tensor, rounding: float = 0.0) -> Expansion | None:
    """The polynomial (degree at most 6) with up to three cosines and sines through values (N,), or None.

    Frequencies are found one by one, each where the spectrum of the residual is highest, and then refined together by
    Gauss-Newton steps on all parameters. `rounding` is the error of the values.
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
    series = np.polynomial.Chebyshev(solution[: degree + 1].numpy(), domain=[float(mu.min()), float(mu.max())])
    powers = series.convert(kind=np.polynomial.Polynomial)
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
    """Drop terms that are rounding errors if the fit stays as close: a trace of mu^6 would decide the tails."""
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
    """The frequency with most power in the residual of a fit with the polynomial and these frequencies."""
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
        cosines, sines = torch.tensor((fitted.cosines, fitted.sines), dtype=torch.float64, device="cpu")
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


LARGEST = 709.0  # exp of more is infinite in float64


@dataclass(frozen=True, eq=False)
class Findings:
    """The results of an inversion by any route.

    `missed` (V, N) is KL + K - r, up to its sign, for each member at each point, of the one log alpha for all. `fits`:
    it is as small as can be told. `decided` is False where it does not fit, but rougher log alphas come ever closer,
    or (`weak`) where the family smooths so little that closeness shows nothing.
    `level` is a constant that `values` are without. Of each member by itself: `alone` has A at mu, (N,) each;
    `own_missed` (V, N) is what that leaves; `each_fits`: it leaves as little as can be told.
    """

    mu: Tensor
    values: Tensor
    members: Sequence[Member]
    missed: Tensor
    log_kappa: float
    potential: Callable[[Tensor], Tensor]
    fits: bool = True
    alone: Sequence[Tensor] = ()
    own_missed: Tensor | None = None
    each_fits: bool = True
    level: float = 0.0
    decided: bool = True
    weak: bool = False

    @property
    def residual(self) -> float:
        """max |KL + K - r|."""
        return float(self.missed.abs().max())

    @property
    def constant(self) -> float:
        """K."""
        return self.level - self.log_kappa

    @property
    def rounding(self) -> float:
        """Rounding error of the penalty's values, from the constant that was in them."""
        return rounding_of(self.level)

    @property
    def overflows(self) -> bool:
        """Whether log alpha has waves so high that their peaks cannot be integrated."""
        if not isinstance(self.potential, Expansion):
            return False
        return sum(map(math.hypot, self.potential.cosines, self.potential.sines)) > LARGEST

    @property
    def range(self) -> float:
        """Largest range of r over mu among the members; at least 1e-3, for penalties that hardly vary."""
        return max(float((self.values.amax(1) - self.values.amin(1)).max()), 1e-3)


def rounding_of(level: float) -> float:
    """A few times the distance between numbers of this size."""
    return 8.0 * sys.float_info.epsilon * abs(level)


def explain(findings: Findings) -> tuple[str, str | None]:
    """Return the explanation, and an alternative where there is no prior."""
    if not findings.decided:
        return _undecided(findings)
    if not findings.fits:
        return _no_common_prior(findings) if findings.each_fits else _not_smooth(findings)
    if findings.overflows:
        return (
            "log alpha exists, and falls on both sides, but exp of it overflows: the inversion has raised its waves "
            "beyond all numbers. Such a prior can be neither given nor checked by numbers.",
            "a family that is less wide: it smooths waves less",
        )
    if not math.isfinite(findings.log_kappa):
        low, high = (float(findings.potential(end)) for end in (findings.mu[:1], findings.mu[-1:]))
        return (
            f"There is a log alpha, but no density: it does not fall fast enough on both sides (it is {low:.3g} at mu "
            f"= {_point(findings.mu[0])} and {high:.3g} at mu = {_point(findings.mu[-1])}), so kappa is infinite.",
            "add a term that grows on both sides, such as a small multiple of mu^2",
        )
    fitted = not isinstance(findings.potential, Expansion)
    return is_a_kl(findings.constant, len(findings.members), findings.residual, fitted=fitted), None


def is_a_kl(constant: float, count: int, residual: float, *, fitted: bool = False) -> str:
    """State that a penalty is a KL plus a constant for `count` members; to within the residual if fitted."""
    members = "at this width of the family" if count == 1 else f"at all {count} widths of the family alike"
    if fitted:
        identity = "its KL" if abs(constant) < 1e-6 else f"its KL plus the constant {constant:.4g}"
        return (
            f"To within {residual:.1g} the penalty is {identity} to one prior, {members}. A fit cannot tell more: "
            "whether there is one to the last digit is not known."
        )
    identity = "exactly its KL" if abs(constant) < 1e-6 else f"its KL plus the constant {constant:.4g}"
    return f"The penalty is {identity} to one prior, {members} (to {residual:.1g})."


def _undecided(findings: Findings) -> tuple[str, str | None]:
    row, column = divmod(int(findings.missed.abs().argmax()), len(findings.mu))
    text = (
        f"Whether the penalty is a KL of this family is not known. The log alpha that was found misses it by "
        f"{findings.residual:.2g} near mu = {_point(findings.mu[column])} (width {findings.members[row].scale:g}), and "
    )
    if findings.weak:
        text += (
            "that shows nothing: the penalty has a kink or bends sharply, so that log alpha may have to be infinite "
            "somewhere, or may have waves that leave no trace in the KL, as families with edges and kinks allow. A "
            "penalty that is smooth can be told; a smoother family and a shorter reach tell more."
        )
    else:
        text += (
            "rougher ones come ever closer: it may be the KL to a prior with parts that are steep or much narrower "
            "than the family, or hardly differ from one. A family that is less wide tells more."
        )
    return text, _dirac_reading(findings, row)


def _no_common_prior(findings: Findings) -> tuple[str, str | None]:
    centre = int(findings.mu.abs().argmin())
    shown = ", ".join(f"{alone[centre]:.4g}" for alone in findings.alone)
    scales = ", ".join(f"{member.scale:g}" for member in findings.members)
    text = (
        f"Each width of the family asks for another prior, so with a width that is trained there is none: log alpha, "
        f"up to its constant, would be {shown} at mu = {_point(findings.mu[centre])} for widths {scales}."
    )
    shapes = [alone - alone[centre] for alone in findings.alone]
    differ = max(float((shape - shapes[0]).abs().max()) for shape in shapes)
    if differ <= 1e-6 * findings.range:
        text += " They differ by constants only."
        return text, "the same penalty plus a function of the width alone, or a width that is fixed"
    return text, "a width that is fixed: then it is a prior of its own at each, if it integrates"


def _not_smooth(findings: Findings) -> tuple[str, str]:
    missed = findings.missed if findings.own_missed is None else findings.own_missed
    row, column = divmod(int(missed.abs().argmax()), len(findings.mu))
    member = findings.members[row]
    frequency = 5.0 / member.spread
    gain = float(member.gain(torch.tensor(frequency, dtype=torch.float64, device="cpu")))
    text = (
        f"The penalty is no KL of this family: whatever log alpha is, smoothing it by the family (width "
        f"{member.scale:g}) misses the penalty, here by {float(missed.abs().max()):.2g} near mu = "
        f"{_point(findings.mu[column])}. A KL is as smooth in mu as the family makes it; this penalty has a kink "
        f"there, or bends more sharply than that. To undo the smoothing multiplies waves of frequency {frequency:.3g} "
        f"by {gain:.2g}, and faster ones by far more."
    )
    return text, _dirac_reading(findings, row)


def _point(mu: Tensor) -> str:
    return f"{round(float(mu), 9) + 0.0:.3g}"


def _dirac_reading(findings: Findings, row: int) -> str:
    """Name the KL to the prior that r suggests, exp(-r(w)) / Z, and its distance from r."""
    mu, values = findings.mu, findings.values[row]
    points, weights = findings.members[row].nodes()
    position = (mu.unsqueeze(-1) + points - mu[0]) / (mu[1] - mu[0])
    left = position.floor().clamp(0, len(mu) - 2).long()  # straight lines between the values, and beyond the ends
    gap = torch.lerp(values[left], values[left + 1], position - left) @ weights - values
    half = 0.5 * float(gap.max() - gap.min())
    return (
        f"the KL to the prior exp(-r(w)) / Z, which is E r(mu + X) and a constant: it follows the penalty up to "
        f"{half:.2g} either way"
    )
