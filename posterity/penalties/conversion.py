"""Conversion between penalties and priors: a catalogue first (theory 002-09), then inversion."""

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor

from posterity.errors import positive, shown
from posterity.numerics.layout import Layout
from posterity.penalties.composed import Sum
from posterity.penalties.divergence import Divergence
from posterity.penalties.expansion import Expansion, Member
from posterity.penalties.explanation import LARGEST, Verdict, is_a_kl
from posterity.penalties.families import Dirac, Family, Gaussian
from posterity.penalties.inversion import KNOWN_BEYOND, invert, invert_expansions
from posterity.penalties.norms import L1, GroupLasso, SquaredL2
from posterity.penalties.penalty import MayIntegrate, NotIntegrable, Penalty, checked_shape, density_of
from posterity.priors.group_lasso import GroupLasso as GroupLassoPrior
from posterity.priors.laplace import Laplace
from posterity.priors.normal import Normal
from posterity.priors.prior import Prior, times
from posterity.priors.tabulated import Tabulated


def verdict_of_points(penalty: Penalty, shape: tuple[int, ...]) -> Verdict:
    """Read r by maximum a posteriori: alpha = exp(-r) / kappa, if that integrates.

    A ValueError where no prior of this library has that density.
    """
    try:
        prior = penalty.prior()
    except MayIntegrate as error:
        return replace(_refused(str(error), math.nan, None), decided=False)
    except NotIntegrable as error:
        return _refused(str(error), math.inf, None)
    log_alpha = _log_density(prior, shape)
    # Far from the mode a table is a guess. A group of zeros has no length.
    mode = torch.tensor(prior.mean if isinstance(prior, Tabulated) else 0.0, dtype=torch.float64, device="cpu")
    lowest = float(penalty(mode.reshape(1, 1))) if penalty.separates else 0.0
    log_kappa = -lowest - float(log_alpha(mode))
    subject = "one weight"
    if isinstance(prior, GroupLassoPrior):
        subject = f"one group of {prior.group_size(shape)} weights, by its length"
    explanation = (
        f"Penalised training with r = {penalty} finds the mode under alpha = exp(-r) / kappa; kappa is that of "
        f"{subject}."
    )
    return _catalogued(prior, explanation, shape, log_kappa)


def refused_means(penalty: Penalty, family: Family) -> Verdict:
    """Refuse norms of the means of posteriors with a width: a KL is smooth in the mean (theory 002-09)."""
    nearest, instead = None, "Take the reading by points, Dirac()."
    with suppress(ValueError):
        nearest = Divergence(penalty.prior(), family)
    if nearest is not None:  # E r(w) - entropy + log Z, with the expectation spelt out where it has a name
        expected = "E r(w)"
        if isinstance(nearest.target, GroupLassoPrior):
            expected = f"{times(float(nearest.target.rate))}E||w_g||"
        elif isinstance(nearest.target, Laplace):
            expected = f"{times(1.0 / float(nearest.target.scale))}E|w|"
        formula = f"{expected} - entropy + log Z"
        instead = f"Nearest is the KL to its prior by points, r(mu, sigma) = {formula}: {nearest}."
    gain = " (at frequency k it would take a gain of exp(sigma^2 k^2 / 2))" if isinstance(family, Gaussian) else ""
    return _refused(
        f"No prior has {penalty} of the means as its KL: averaging over {family} makes every KL smooth in mu, and this "
        f"penalty has a kink at 0{gain}. {instead}",
        math.nan,
        nearest,
    )


def _catalogued(prior: Prior, explanation: str, shape: tuple[int, ...], log_kappa: float = 0.0) -> Verdict:
    """Accept r = -log p + K for this prior; the explanation gains the variance of one weight."""
    return Verdict(
        satisfies_star=True,
        kappa=_exp(log_kappa),  # infinite for groups of hundreds
        K=0.0 - log_kappa,
        residual=0.0,
        noise_amplification=0.0,
        log_alpha=_log_density(prior, shape),
        prior=prior,
        explanation=f"{explanation} {variance_in_words(prior, shape)}",
        nearest=None,
        route="catalogue",
    )


def _exp(log_kappa: float) -> float:
    return math.exp(log_kappa) if log_kappa < LARGEST else math.inf


def _refused(explanation: str, kappa: float, nearest: Penalty | None) -> Verdict:
    return Verdict(
        satisfies_star=False,
        kappa=kappa,
        K=-kappa,
        residual=math.inf,
        noise_amplification=math.inf,
        log_alpha=lambda t: torch.full_like(t, math.nan),
        prior=None,
        explanation=explanation,
        nearest=nearest,
        route="catalogue",
    )


def _log_density(prior: Prior, shape: tuple[int, ...]) -> Callable[[Tensor], Tensor]:
    """t -> log p of a weight t, or of one group of a tensor of `shape` whose length is |t|."""
    if not isinstance(prior, GroupLassoPrior):
        return lambda t: prior.log_prob(t.unsqueeze(-1))
    group = replace(prior, over="rows").bound(Layout.of({"weight": (1, prior.group_size(shape))}))
    highest = float(group.log_prob(torch.zeros(prior.group_size(shape), dtype=torch.float64, device="cpu")))
    return lambda t: highest - float(prior.rate) * t.abs()


def variance_of_one(prior: Prior, shape: tuple[int, ...]) -> float:
    """Prior variance of one weight of a tensor of `shape`; all its weights have the same."""
    if isinstance(prior, GroupLassoPrior):
        return (prior.group_size(shape) + 1.0) / float(prior.rate) ** 2
    return float(prior.bound(Layout.of({"weight": (1, 1)})).variance(torch.zeros(1, dtype=torch.float64, device="cpu")))


def variance_in_words(prior: Prior, shape: tuple[int, ...]) -> str:
    """One sentence on the variance of one weight of a tensor of `shape`."""
    value = variance_of_one(prior, shape)
    return f"One weight has variance {value:.6g}." if math.isfinite(value) else "One weight has no finite variance."


_NEAR, _FAR = 0.9, 0.75  # shares of the way to the end where the fall is measured
_MOST = 2.0  # tails thinner than a normal's are not guessed


def extended(log_density: Callable[[Tensor], Tensor], reach: float) -> Callable[[Tensor], Tensor]:
    """A log density known between -`reach` and `reach`, continued on either side as a - c |t|^p.

    c and p follow from what it loses over the last tenth of the way to the end, and over the tenth before three
    quarters of it. p is kept between 0, a power of |t|, and 2, a normal; 1 is an exponential.

    >>> known = extended(lambda t: -3.0 * t.clamp(-4.0, 4.0).abs(), 4.0)
    >>> known(torch.tensor([1.0, 10.0, -20.0], dtype=torch.float64)).round()
    tensor([ -3., -30., -60.], dtype=torch.float64)
    """
    ends = torch.tensor([1.0, _NEAR, _FAR, _NEAR * _FAR], dtype=torch.float64, device="cpu") * reach
    tails = []
    for sign in (-1.0, 1.0):
        values = log_density(sign * ends).tolist()
        outer, inner = values[0] - values[1], values[2] - values[3]
        power = -math.log(outer / inner) / math.log(_FAR) if outer < 0.0 and inner < 0.0 else 0.0
        power = min(max(power, 1e-6), _MOST)
        tails.append((-outer / math.expm1(power * math.log(_NEAR)), power))  # the fall from 0 to the end, and p

    def continued(t: Tensor) -> Tensor:
        inside = log_density(t.clamp(-reach, reach))
        beyond = (t.abs() / reach).clamp_min(1.0).log()
        for sign, (fall, power) in zip((-1.0, 1.0), tails, strict=True):
            inside = inside + torch.where(sign * t > reach, fall * torch.expm1(power * beyond), 0.0)
        return inside

    return continued


_POINTS = 161
_MOST_POINTS = 1601
_LEAST_REACH = 2.0
_LOOSE = 1e-2  # of the penalty's range: a table whose KL misses it by more is not given
_FELT = 30.0  # nats below the highest: what is lower has no mass
_OUTSIDE = 1e-3  # of the mass beyond the grid: so much is told


def from_prior(prior: Prior, family: Family) -> Penalty:
    """The penalty of a prior for posteriors of `family`: r = KL(beta_{mu, nu} || prior).

    For points it is the catalogued penalty with its factor where there is one (`SquaredL2`, `L1`, `GroupLasso`), else
    -log p. For other families it is a `Divergence`, which knows its prior.

    >>> str(from_prior(Laplace(0.5), Dirac())), str(from_prior(Laplace(0.5), Gaussian()))
    ('2 sum of |w|', 'KL(Gaussians of any scale || Laplace(scale=0.5, mean=0.0))')
    """
    divergence = Divergence(prior, family)
    if isinstance(family, Dirac):
        if isinstance(prior, Normal) and prior.mean == 0.0:
            return Sum((SquaredL2(),), (0.5 / float(prior.scale) ** 2,))
        if isinstance(prior, Laplace) and prior.mean == 0.0:
            return Sum((L1(),), (1.0 / float(prior.scale),))
        if isinstance(prior, GroupLassoPrior):
            return Sum((GroupLasso(prior.over),), (float(prior.rate),))
    return divergence


def to_prior(penalty: Penalty, family: Family, *, shape: tuple[int, ...] = (1, 1), reach: float = 4.0) -> Verdict:
    """The prior alpha with r(mu, nu) = KL(beta_{mu, nu} || alpha) + K for all mu and nu, or why there is none.

    The catalogue is asked first, then polynomials and cosines are inverted exactly, all else numerically from values of
    r between -`reach` and `reach`. The shape of the weight tensor, `shape`, decides the size of groups.

    >>> decay = Sum((SquaredL2(),), (2.0,))
    >>> to_prior(decay, Gaussian(0.3)).prior.scale, to_prior(decay, Gaussian((0.2, 0.5, 1.0))).satisfies_star
    (0.5, False)
    """
    if not isinstance(penalty, Penalty):
        raise TypeError(
            "to_prior needs a penalty: SquaredL2(), L1(), ..., or Function(r) for one of your own. "
            f"Got {shown(penalty)}."
        )
    if not isinstance(family, Family):
        raise TypeError(f"to_prior needs a family: Dirac(), Gaussian(...) or Translation(...). Got {shown(family)}.")
    checked_shape(shape)
    positive("reach", reach)
    parts = penalty.parts if isinstance(penalty, Sum) else {penalty: 1.0}
    known = _known(parts, family)
    if known is not None:
        kind = "-log p of" if isinstance(family, Dirac) else f"the KL of {family} to"
        return _catalogued(known, f"The penalty is {kind} this prior.", shape)
    if isinstance(family, Dirac):
        return verdict_of_points(penalty, shape)
    if any(isinstance(part, (L1, GroupLasso)) for part in parts):
        if not family.is_continuous:
            raise ValueError(
                f"to_prior: the density of {family} has an edge, and can make the kink of {penalty} out of a log alpha "
                "with jumps, which is not looked for. Give a density that falls to 0 at both ends, or read by Dirac()."
            )
        return refused_means(penalty, family)
    if not penalty.separates:
        raise ValueError(f"to_prior: {penalty} mixes groups of weights, which only its own family can read.")
    return _inverted(penalty, parts, family, reach)


def _known(parts: dict[Penalty, float], family: Family) -> Prior | None:
    """The prior of a penalty made from it for this kind of family, else None."""
    part, factor = next(iter(parts.items()))
    if len(parts) != 1 or not isinstance(part, Divergence) or factor != 1.0:
        return None
    if isinstance(family, Dirac):  # which reads it as -log p, whatever family it was made for
        return part.target
    same = type(part.family) is type(family) and replace(part.family, scale=1.0) == replace(family, scale=1.0)  # type: ignore[type-var]
    return part.target if same else None


def _inverted(penalty: Penalty, parts: dict[Penalty, float], family: Family, reach: float) -> Verdict:
    members = [Member(family, scale) for scale in family.scales]
    if set(parts) == {SquaredL2()}:
        factor = parts[SquaredL2()]
        verdict = invert_expansions([Expansion((0.0, 0.0, factor)) for _ in members], members)
        if isinstance(family, Gaussian) and not family.is_fixed:
            nearest = Divergence(penalty.prior(), family)
            verdict = replace(verdict, explanation=_varying_decay(factor, members), nearest=nearest)
    else:
        verdict = _by_values(penalty, members, reach)
    if verdict.satisfies_star and verdict.prior is None:
        verdict = _with_table(verdict, penalty, members, reach)
    if verdict.prior is None:
        return verdict
    return replace(verdict, explanation=f"{verdict.explanation} {variance_in_words(verdict.prior, (1, 1))}")


def _by_values(penalty: Penalty, members: list[Member], reach: float) -> Verdict:
    """Invert values of r on a grid with at least two means for each standard deviation of the least wide member.

    Densities given by the user get four: they may have edges and kinks, and then smooth little.
    """
    finest = min(member.spread for member in members)
    dense = 2 if all(isinstance(member.family, Gaussian) for member in members) else 4
    wanted = max(_POINTS, dense * math.ceil(2.0 * reach / finest) + 1)
    mu = torch.linspace(-reach, reach, min(wanted, _MOST_POINTS), dtype=torch.float64, device="cpu")
    values = torch.stack([penalty.each(mu, torch.full_like(mu, member.scale)) for member in members])
    try:
        verdict = invert(mu, values, members)
    except ValueError as error:
        if wanted <= _MOST_POINTS:
            raise
        raise ValueError(
            f"to_prior: reach must be at most {_MOST_POINTS // 4} times the family's least standard deviation, "
            f"{finest:g}, for the grid to see it. Got {reach:g}. Give a shorter reach, or read by points, Dirac()."
        ) from error
    widest = max(member.spread for member in members)
    if verdict.route != "polynomial" and reach < _LEAST_REACH * widest:
        raise ValueError(
            f"to_prior: reach must be at least {_LEAST_REACH:g} times the family's standard deviation, {widest:g}, or "
            f"the penalty is too smooth over the grid to tell its prior. Got {reach:g}. Give reach={3.0 * widest:g}."
        )
    return verdict


def _varying_decay(factor: float, members: list[Member]) -> str:
    """Explain why weight decay on the means is no prior when the scale is trained (theory 002-08)."""
    constants = [factor * float(member.moments(2)[2]) - member.entropy for member in members]
    listed = ", ".join(f"{value:.3g} at {member.scale:g}" for value, member in zip(constants, members, strict=True))
    return (
        f"{times(factor)}mu^2 says nothing about the scale, but a KL does: A(0) = {times(factor)}sigma^2 - entropy is "
        f"{listed}, where it should be one number. With the scale fixed the prior is N(0, {0.5 / factor:g}); "
        "with a trained scale use the KL to it."
    )


def _with_table(verdict: Verdict, penalty: Penalty, members: list[Member], reach: float) -> Verdict:
    """Add log alpha as a tabulated prior to the verdict, if the KL to the table is the penalty."""
    exact = verdict.route in ("polynomial", "trigonometric")
    known = reach + KNOWN_BEYOND * max(member.spread for member in members)
    log_alpha = verdict.log_alpha if exact else extended(verdict.log_alpha, known)
    try:
        table = density_of(lambda w: -log_alpha(w), 1.0, "log alpha")
    except NotIntegrable:
        hint = f"Its tails are not seen between -{reach:g} and {reach:g}: give a longer reach to have it as a prior."
        told = replace(verdict, explanation=f"{verdict.explanation} {hint}")
        # Two guesses at the tails do not agree, where they are guessed: then it is not known.
        return told if exact else replace(told, satisfies_star=False, decided=False, kappa=math.nan, K=math.nan)
    except ValueError as error:
        return replace(verdict, explanation=f"{verdict.explanation} {error}")
    if all(member.family.knows_its_density for member in members):
        constant, missed, varies = _closeness(table, penalty, members, reach)
    else:  # an exact log alpha, by moments: the table is that density, or is not
        constant, (missed, varies) = verdict.K, _faithfulness(table, log_alpha, known)
    if missed > _LOOSE * varies + 10.0 * verdict.residual:
        hint = f"A table of it would be in error by {missed:.2g} between -{reach:g} and {reach:g}, and is not given."
        if exact:
            return replace(verdict, explanation=f"{verdict.explanation} {hint}")
        # The table knows the integral of log alpha with its tails.
        mode = torch.tensor([table.mean], dtype=torch.float64, device="cpu")
        excess = float(log_alpha(mode)) - float(table.log_prob(mode))
        constant = verdict.K - excess

        def normalised(t: Tensor) -> Tensor:
            return log_alpha(t.double()).to(t.dtype) - excess

        words = f"{verdict.explanation}{_tails_in_words(normalised, reach)} {hint}"
        return replace(verdict, K=constant, kappa=_exp(-constant), log_alpha=normalised, explanation=words)
    if exact:
        return replace(verdict, prior=table)
    tabulated = _log_density(table, (1, 1))
    words = is_a_kl(constant, len(members), verdict.residual, fitted=True) + _tails_in_words(tabulated, reach)
    return replace(verdict, prior=table, K=constant, kappa=_exp(-constant), log_alpha=tabulated, explanation=words)


def _closeness(table: Tabulated, penalty: Penalty, members: list[Member], reach: float) -> tuple[float, float, float]:
    """Return K of r = KL + K for the KL to a table, the largest error of KL + K, and the range of r."""
    mu = torch.linspace(-reach, reach, 41, dtype=torch.float64, device="cpu")
    values, gaps = [], []
    for member in members:
        values.append(penalty.each(mu, torch.full_like(mu, member.scale)))
        expected = member.smooth(lambda w: table.log_prob(w.unsqueeze(-1)), mu)
        gaps.append(values[-1] + member.entropy + expected)
    gap = torch.stack(gaps)
    constant = float(gap.median())
    varies = max(float(row.max() - row.min()) for row in values)
    return constant, float((gap - constant).abs().max()), varies


def _faithfulness(table: Tabulated, log_alpha: Callable[[Tensor], Tensor], known: float) -> tuple[float, float]:
    """Return the largest error of a table where its log density has mass, and the range of the log density there."""
    grid = torch.linspace(-known, known, 401, dtype=torch.float64, device="cpu")
    wanted = log_alpha(grid)
    felt = wanted > wanted.max() - _FELT
    missed = (table.log_prob(grid.unsqueeze(-1)) - wanted)[felt]
    return float(missed.abs().max()), float(wanted[felt].max() - wanted[felt].min())


def _tails_in_words(log_density: Callable[[Tensor], Tensor], reach: float) -> str:
    """Warn that K depends on guessed tails if the density has mass beyond -`reach` and `reach`; else return ""."""
    grid = torch.linspace(-reach, reach, 8001, dtype=torch.float64, device="cpu")
    outside = 1.0 - float(torch.trapezoid(log_density(grid).exp(), grid))
    if outside < _OUTSIDE:
        return ""
    return (
        f" About {100.0 * outside:.2g} % of the prior lies beyond -{reach:g} and {reach:g}, where its tails are "
        "guessed, and with them K, kappa and its variance: a longer reach tells more."
    )
