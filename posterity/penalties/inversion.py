"""Numerical inversion of a penalty, and how far it can be trusted."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from posterity.errors import shown, unknown
from posterity.numerics.random import Key
from posterity.penalties.expansion import (
    Expansion,
    Member,
    expansion_log_kappa,
    grid_log_kappa,
    invert_expansion,
    invert_polynomial,
    smooth_expansion,
)
from posterity.penalties.explanation import (
    LARGEST,
    Findings,
    Route,
    Verdict,
    explain,
    fit_expansion,
    recognise_polynomial,
    recognise_trigonometric,
    rounding_of,
)
from posterity.penalties.spline import ForwardFit, Spline, forward_fit, interpolate
from posterity.priors.normal import Normal

# Shares of what r varies by nearby. With three knots to a standard deviation of the family kinks and most jumps of log
# alpha leave up to 5.5e-3 of that, a pole or a spike without end 8e-3 and more.
_LEFT = 6e-3
# Families that leave nothing of fast waves follow every KL to 1e-6 of that; |mu|^3 and |mu|^5 leave 5e-3.
_LEFT_BY_SMOOTH = 1e-4
# A kink of log alpha moves by 0.05 as splines may be rougher, waves that leave no trace in r by 0.6 and more.
_MOVED = 0.1
_KNOTS = 3.0
# Splines as rough as this are tried before a penalty is refused. Of a KL to a prior with a kink or a narrow spike they
# leave up to 6e-8 of its range, of what is no KL more than 1e-7, unless it hardly differs from one.
_LEAST_SMOOTHNESS = 1e-15
_SPARSE = 1.21  # distances of knots between means: at more a spline goes through all values, whatever they are


def shows_a_prior(
    fit: ForwardFit, mu: Tensor, targets: Tensor, members: Sequence[Member], smoothness: tuple[float, float]
) -> bool:
    """Whether the fit is close at every mean for shifted knots too, and log alpha is stable with less smoothing.

    `targets` are -r up to a constant for each member, (V, N); `smoothness` is the usual one, and the least.
    """
    if fit.spacing > _SPARSE * fit.step:
        return False
    nearby = _nearby(targets, members, fit.spacing)
    fits = (fit, forward_fit(mu, members, between=True))  # a pole at a knot is followed too well
    missed = torch.stack([_missed(either, targets, smoothness[1]) for either in fits])
    usual, rough = (fit.solve(targets.reshape(-1, 1), amount)[:, 0] for amount in smoothness)
    finer = min(1.0, _KNOTS * fit.step / fit.unit)  # what is left of a jump goes with the square of the knots' distance
    left = float((missed.abs() / nearby).max())
    moved = float((fit.spline(rough - usual)(mu).abs() / nearby.amin(0)).max())
    return left <= _LEFT * finer**2 and moved <= _MOVED


def _nearby(targets: Tensor, members: Sequence[Member], spacing: float) -> Tensor:
    """Range of each row of targets (V, N) within one standard deviation of its member, at each mean; positive."""
    ranges = []
    for values, member in zip(targets, members, strict=True):
        half = max(1, math.ceil(member.spread / spacing))
        padded = torch.nn.functional.pad(values[None, None], (half, half), mode="replicate")
        high, low = (torch.nn.functional.max_pool1d(sign * padded, 2 * half + 1, 1)[0, 0] for sign in (1.0, -1.0))
        ranges.append((high + low).clamp_min(max(1e-6 * float((high + low).max()), 1e-9)))
    return torch.stack(ranges)


def _missed(fit: ForwardFit, targets: Tensor, smoothness: float = _LEAST_SMOOTHNESS) -> Tensor:
    """Error of the smoothed spline at each target (V, N) or (N,)."""
    column = targets.reshape(-1, 1)
    return (fit.matrix @ fit.solve(column, smoothness) - column).reshape(targets.shape)


_WINDOW = 1.5  # width of the window's edges in standard deviations of the family: below 1 the inverse diverges
_TIKHONOV = 1e-4
_LAST_POINTS = 8  # by which the values are continued beyond the grid


def invert_fourier(mu: Tensor, target: Tensor, member: Member) -> Spline:
    """Return g with E g(mu + X) close to target (N,) at equidistant mu (N,), by Tikhonov-regularised deconvolution.

    The best quadratic is inverted exactly. The remainder is continued beyond the grid by the cubics through its ends,
    faded out there by a window with Gaussian edges, transformed, multiplied by conj(phi) / (|phi|^2 + 1e-4) with
    phi(k) = E exp(i k X), and transformed back. The continuation biases g near the ends of the grid.
    """
    spacing = float(mu[1] - mu[0])
    quadratic = fit_expansion(mu, target, 2, ())
    left = target - quadratic(mu)
    width = _WINDOW * member.spread
    extra = math.ceil(10.0 * width / spacing)
    steps = spacing * torch.arange(1, extra + 1, dtype=torch.float64, device="cpu")
    window = torch.special.ndtr(5.0 - steps / width)
    last = spacing * torch.arange(1 - _LAST_POINTS, 1, dtype=torch.float64, device="cpu")
    before, after = (window * fit_expansion(last, side[-_LAST_POINTS:], 3, ())(steps) for side in (left.flip(0), left))
    padded = torch.cat([before.flip(0), left, after])
    frequency = 2.0 * math.pi * torch.fft.fftfreq(len(padded), d=spacing, dtype=torch.float64, device="cpu")
    phi = member.characteristic(frequency)
    spectrum = torch.fft.fft(padded) * phi.conj() / (phi.abs().square() + _TIKHONOV)
    wavy = torch.fft.ifft(spectrum).real[extra : extra + len(mu)]
    return interpolate(mu, wavy + Expansion(invert_polynomial(quadratic.coefficients, member))(mu))


_NOISE = 1e-8  # standard deviation of what is added to r to see how it grows
_SMOOTHNESS = 1e-12
KNOWN_BEYOND = 3.0  # standard deviations of the family beyond the grid, where values of r still tell what g is
# What may be left of r, over its range on the grid, for a prior to count as found. Fourier's route is blind below this.
_ALLOWED: dict[Route, float] = {"polynomial": 1e-8, "trigonometric": 1e-8, "spline": 1e-7, "fourier": 1e-3}
# By how much less is left of a KL where splines may be a thousand times rougher; kinks and poles leave 1/2 to 1/5.
_COMES_CLOSER = 8.0
_LEVEL = 10.0  # times its range: a constant so large is taken from the penalty, whose last digits would be lost


def log_alpha_up_to_constant(expansion: Expansion, member: Member) -> Expansion:
    """Return A = log alpha + log kappa = -entropy - (the inverse of r), for r known exactly (theory 002-06)."""
    inverse = invert_expansion(expansion, member)
    constant, *rest = (-value for value in inverse.coefficients)
    cosines, sines = (tuple(-value for value in part) for part in (inverse.cosines, inverse.sines))
    return Expansion((constant - member.entropy, *rest), inverse.frequencies, cosines, sines)


def invert(mu: Tensor, values: Tensor, members: Sequence[Member], route: Route | None = None) -> Verdict:
    """Decide which prior r has, from its values (V, N) at equidistant mu (N,), one row for each of the V members.

    Without `route` the exact ones are tried first (polynomial, then with cosines), then the spline. "fourier" serves
    comparison only: it resolves r to 1e-3 of its range, and so accepts some penalties that have no prior (Huber's at a
    width of 0.3). Where it finds none, that is decided only if the spline finds none either.

    >>> from posterity.penalties.families import Gaussian
    >>> mu = torch.linspace(-4.0, 4.0, 81, dtype=torch.float64)
    >>> verdict = invert(mu, 2.0 * mu.square().unsqueeze(0), [Member(Gaussian(0.5), 0.5)])
    >>> verdict.route, verdict.satisfies_star, round(verdict.prior.scale, 6)
    ('polynomial', True, 0.5)
    """
    mu, values = _checked(mu, values, members)
    low, high = float(values.min()), float(values.max())
    middle = 0.5 * (low + high)
    level = middle if abs(middle) > _LEVEL * (high - low) else 0.0
    values = values - level
    if route == "catalogue":
        raise ValueError("invert: the catalogue is looked up by to_prior. Give another route, or none.")
    if route not in (None, *_ALLOWED):
        raise ValueError(f"invert: {unknown('route', str(route), _ALLOWED)}")
    for kind, name, recognise in (
        ("polynomial", "polynomial", recognise_polynomial),
        ("trigonometric", "polynomial with cosines", recognise_trigonometric),
    ):
        if route not in (None, kind):
            continue
        expansions: list[Expansion] = []
        for row in values:
            expansion = recognise(mu, row, rounding_of(level))
            if expansion is None:
                break
            expansions.append(expansion)
        if len(expansions) == len(values):
            return _exact(mu, values, expansions, members, level)
        if route is not None:
            raise ValueError(f"invert: on this grid the penalty is no {name} to the last digits. Give route=None.")
    spacing, spread = float(mu[1] - mu[0]), min(member.spread for member in members)
    if spread == 0.0:
        raise ValueError("invert: a family without width needs no inversion: log alpha is -r. Use Dirac's reading.")
    if spacing > 0.5 * spread * (1.0 + 1e-6):
        raise ValueError(
            f"invert: the grid must have steps of at most half the family's standard deviation, {0.5 * spread:.3g}, "
            f"or a kink cannot be told from a curve. Got steps of {spacing:.3g}."
        )
    if route != "fourier":
        return _by_spline(mu, values, members, level)
    verdict = _by_fourier(mu, values, members, level)
    if verdict.satisfies_star:
        return verdict
    spline = _by_spline(mu, values, members, level)  # resolves more, so that it can tell whether there is none
    if spline.decided and not spline.satisfies_star:
        return verdict
    explanation = (
        f"Deconvolution finds no log alpha, but resolves r to {_ALLOWED['fourier']:g} of its range only: there may be "
        "one. Leave route out."
    )
    return replace(verdict, decided=False, explanation=explanation, nearest=None)


def invert_expansions(expansions: Sequence[Expansion], members: Sequence[Member]) -> Verdict:
    """Decide which prior r has, for r known exactly: one polynomial with cosines for each member.

    Residual and noise are evaluated at 81 means over 8 standard deviations (at least 8).
    """
    reach = 4.0 * max(1.0, *(member.spread for member in members))
    mu = torch.linspace(-reach, reach, 81, dtype=torch.float64, device="cpu")
    values = torch.stack([expansion(mu) for expansion in expansions])
    mu, values = _checked(mu, values, members)
    return _exact(mu, values, expansions, members)


def _exact(
    mu: Tensor, values: Tensor, expansions: Sequence[Expansion], members: Sequence[Member], level: float = 0.0
) -> Verdict:
    """Invert by moments and characteristic functions."""
    potentials = [
        log_alpha_up_to_constant(expansion, member) for expansion, member in zip(expansions, members, strict=True)
    ]
    first = potentials[0]
    missed = []
    for member, row in zip(members, values, strict=True):
        finer = member.finer_nodes()  # independent of the nodes that gave the moments, if available
        if finer is None:
            smoothed = smooth_expansion(first, member)(mu)
        else:
            smoothed = first(mu.unsqueeze(-1) + finer[0]) @ finer[1]
        missed.append(smoothed + member.entropy + row)
    noise = _noise(mu)
    basis = len(expansions[0].coefficients) - 1, expansions[0].frequencies
    grown = invert_expansion(fit_expansion(mu, noise, *basis), members[0])(mu)
    route: Route = "trigonometric" if first.frequencies else "polynomial"
    findings = Findings(mu, values, members, torch.stack(missed), expansion_log_kappa(first), first, level=level)
    fits = findings.residual <= _ALLOWED[route] * findings.range + findings.rounding
    findings = replace(findings, fits=fits, alone=[potential(mu) for potential in potentials])
    return _verdict(findings, route, grown, noise)


def _by_spline(mu: Tensor, values: Tensor, members: Sequence[Member], level: float) -> Verdict:
    """Fit one spline for all members."""
    targets = -values - torch.tensor([[member.entropy] for member in members], dtype=torch.float64, device="cpu")
    noise = _noise(mu).expand_as(targets)
    fit = forward_fit(mu, members)
    both = fit.solve(torch.stack([targets.reshape(-1), noise.reshape(-1)], dim=-1), _SMOOTHNESS)
    potential, grown = fit.spline(both[:, 0]), fit.spline(both[:, 1])(mu)
    missed = (fit.check @ both[:, 0]).reshape(targets.shape) - targets
    beyond = KNOWN_BEYOND * max(member.spread for member in members)
    log_kappa = grid_log_kappa(potential, float(mu[0]) - beyond, float(mu[-1]) + beyond)
    findings = Findings(mu, values, members, missed, log_kappa, potential, level=level)
    allowed = (_ALLOWED["spline"] + fit.blind) * findings.range + findings.rounding
    close = float(_missed(fit, targets).abs().max()) <= allowed
    if not close:
        sure = True
    elif fit.blind > _ALLOWED["spline"]:
        sure = shows_a_prior(fit, mu, targets, members, (_SMOOTHNESS, _LEAST_SMOOTHNESS))
    else:
        small = _LEFT_BY_SMOOTH * _nearby(targets, members, fit.spacing) + findings.rounding
        sure = bool((_missed(fit, targets).abs() <= small).all())
    findings = replace(findings, fits=close and sure, weak=close and not sure, decided=sure)
    if not findings.fits and findings.decided:  # for the explanation: whether each member has a prior of its own
        fits = [forward_fit(mu, [member]) for member in members]
        alone = [fit.solve(t.unsqueeze(-1), _SMOOTHNESS)[:, 0] for fit, t in zip(fits, targets, strict=True)]
        # The error of every KL falls as splines may be rougher, however narrow the prior.
        first, second, third = (float(_missed(fit, targets, amount).abs().max()) for amount in (1e-12, 1e-15, 1e-18))
        findings = replace(
            findings,
            alone=[fit.spline(a)(mu) for fit, a in zip(fits, alone, strict=True)],
            own_missed=torch.stack([fit.matrix @ a - t for fit, a, t in zip(fits, alone, targets, strict=True)]),
            each_fits=all(float(_missed(fit, t).abs().max()) <= allowed for fit, t in zip(fits, targets, strict=True)),
            decided=not (first >= _COMES_CLOSER * second or second >= _COMES_CLOSER * third),
        )
    return _verdict(findings, "spline", grown, noise)


def _by_fourier(mu: Tensor, values: Tensor, members: Sequence[Member], level: float) -> Verdict:
    """Invert by Fourier transform at the least wide member; check against all, in the middle three fifths of `mu`."""
    edge = 0.2 * (mu[-1] - mu[0])
    middle = (mu >= mu[0] + edge) & (mu <= mu[-1] - edge)  # away from the continuation
    functions = [invert_fourier(mu, -r - member.entropy, member) for r, member in zip(values, members, strict=True)]
    index = min(range(len(members)), key=lambda i: members[i].spread)
    potential, noise = functions[index], _noise(mu)
    grown = invert_fourier(mu, noise, members[index])(mu)[middle]
    mu, values = mu[middle], values[:, middle]
    missed, own_missed = (
        torch.stack([m.smooth(f, mu) + m.entropy + r for m, f, r in zip(members, tried, values, strict=True)])
        for tried in ([potential] * len(members), functions)
    )
    log_kappa = grid_log_kappa(potential, float(mu[0]), float(mu[-1]))
    findings = Findings(mu, values, members, missed, log_kappa, potential, level=level)
    allowed = _ALLOWED["fourier"] * findings.range + findings.rounding
    findings = replace(
        findings,
        fits=findings.residual <= allowed,
        alone=[function(mu) for function in functions],
        own_missed=own_missed,
        each_fits=float(own_missed.abs().max()) <= allowed,
    )
    return _verdict(findings, "fourier", grown, noise)


def _verdict(findings: Findings, route: Route, grown: Tensor, noise: Tensor) -> Verdict:
    log_kappa, constant = (findings.log_kappa, findings.constant) if findings.fits else (math.nan, math.nan)
    good = findings.fits and math.isfinite(log_kappa) and not findings.overflows
    explanation, nearest = explain(findings)
    potential, shift = findings.potential, log_kappa if math.isfinite(log_kappa) else 0.0
    return Verdict(
        satisfies_star=good,
        decided=findings.decided and not (findings.fits and findings.overflows),
        kappa=math.exp(-constant) if not -constant >= LARGEST else math.inf,
        K=constant,
        residual=findings.residual,
        noise_amplification=float(grown.abs().max() / noise.abs().max()),
        log_alpha=lambda t: potential(t) - shift,
        prior=_named(potential) if good else None,
        explanation=explanation,
        nearest=nearest,
        route=route,
    )


def _named(potential: Callable[[Tensor], Tensor]) -> Normal | None:
    """The normal prior if A is a parabola, else None."""
    if not isinstance(potential, Expansion) or potential.frequencies or len(potential.coefficients) != 3:
        return None
    _, slope, curvature = potential.coefficients
    return Normal(math.sqrt(-0.5 / curvature), -0.5 * slope / curvature + 0.0)  # no -0.0


def _noise(mu: Tensor) -> Tensor:
    return _NOISE * Key(0).fold("penalty inversion").normal(tuple(mu.shape), torch.float64, "cpu")


def _checked(mu: Tensor, values: Tensor, members: Sequence[Member]) -> tuple[Tensor, Tensor]:
    """Check shapes, spacing and finiteness; return both in float64 on the CPU."""
    if mu.dim() != 1 or len(mu) < 16 or not bool(torch.isfinite(mu).all()):
        raise ValueError(f"invert: mu must be (N,) with at least 16 finite points. Got {shown(mu)}.")
    mu, values = mu.detach().double().cpu(), values.detach().double().cpu()
    steps = mu.diff()
    if float(steps.min()) <= 0.0 or float(steps.max() - steps.min()) > 1e-4 * float(steps.mean()):
        raise ValueError(f"invert: mu must rise in equal steps. Got steps from {steps.min():.6g} to {steps.max():.6g}.")
    if not members or values.shape != (len(members), len(mu)):
        raise ValueError(
            f"invert: values must be (members, points) = ({len(members)}, {len(mu)}). Got {tuple(values.shape)}."
        )
    if not bool(torch.isfinite(values).all()):
        raise ValueError("invert: the penalty must be finite at every mu. It is not: choose another grid.")
    return mu, values
