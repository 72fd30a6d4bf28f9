"""Penalties whose prior is known, and those that are known to have none (theory 002-09)."""

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from posterity.numerics.layout import Layout
from posterity.penalties.divergence import Divergence
from posterity.penalties.families import Dirac, Family, Gaussian
from posterity.penalties.inversion.explanation import LARGEST
from posterity.penalties.penalty import NotIntegrable, Penalty
from posterity.penalties.verdict import Verdict
from posterity.priors.group_lasso import GroupLasso as GroupLassoPrior
from posterity.priors.laplace import Laplace
from posterity.priors.prior import Prior, times
from posterity.priors.tabulated import Tabulated


def verdict_of_target(prior: Prior, family: Family, shape: tuple[int, ...]) -> Verdict:
    """That of the KL to a prior: it is this prior, with K = 0; log alpha is of one weight, or of a group by length."""
    kind = "-log p of" if isinstance(family, Dirac) else f"the KL of {family} to"
    return Verdict(
        satisfies_star=True,
        kappa=1.0,
        K=0.0,
        residual=0.0,
        noise_amplification=0.0,
        log_alpha=_log_density(prior, shape),
        prior=prior,
        explanation=f"The penalty is {kind} this prior. {variance_in_words(prior, shape)}",
        nearest=None,
        route="catalogue",
    )


def verdict_of_points(penalty: Penalty, shape: tuple[int, ...]) -> Verdict:
    """The reading by maximum a posteriori: alpha = exp(-r) / kappa, where that integrates.

    A ValueError where it may, but no prior of this library is it.
    """
    try:
        prior = penalty.prior()
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
    return Verdict(
        satisfies_star=True,
        kappa=math.exp(log_kappa) if log_kappa < LARGEST else math.inf,  # as it may be for groups of hundreds
        K=0.0 - log_kappa,
        residual=0.0,
        noise_amplification=0.0,
        log_alpha=log_alpha,
        prior=prior,
        explanation=(
            f"Penalised training with r = {penalty} finds the mode under alpha = exp(-r) / kappa; kappa is that of "
            f"{subject}. {variance_in_words(prior, shape)}"
        ),
        nearest=None,
        route="catalogue",
    )


def refused_means(penalty: Penalty, family: Family, shape: tuple[int, ...]) -> Verdict:
    """Norms of the means of posteriors with a width: no prior, because a KL is smooth in the mean (theory 002-09)."""
    nearest = _nearest(penalty, family)
    instead = (
        "Take the reading by points, Dirac()."
        if nearest is None
        else f"Nearest is the KL to its prior by points, r(mu, sigma) = {_divergence_formula(nearest)}: {nearest}."
    )
    gain = " (at frequency k it would take a gain of exp(sigma^2 k^2 / 2))" if isinstance(family, Gaussian) else ""
    return _refused(
        f"No prior has {penalty} of the means as its KL: averaging over {family} makes every KL smooth in mu, and this "
        f"penalty has a kink at 0{gain}. {instead}",
        math.nan,
        nearest,
    )


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


def _nearest(penalty: Penalty, family: Family) -> Divergence | None:
    """The KL to the prior of the reading by points, where it can be had."""
    try:
        return Divergence(penalty.prior(), family)
    except ValueError:
        return None


def _divergence_formula(divergence: Divergence) -> str:
    """E r(w) - entropy + log Z, with the expectation spelt out where it has a name (theory 002-09)."""
    target = divergence.target
    if isinstance(target, GroupLassoPrior):
        return f"{times(float(target.rate))}E||w_g|| - entropy + log Z"
    expected = f"{times(1.0 / float(target.scale))}E|w|" if isinstance(target, Laplace) else "E r(w)"
    return f"{expected} - entropy + log Z"


def _log_density(prior: Prior, shape: tuple[int, ...]) -> Callable[[Tensor], Tensor]:
    """t -> log p of a weight t, or of one group of a tensor of `shape` whose length is |t|."""
    if not isinstance(prior, GroupLassoPrior):
        return lambda t: prior.log_prob(t.unsqueeze(-1))
    group = replace(prior, over="rows").bound(Layout.of({"weight": (1, prior.group_size(shape))}))
    highest = float(group.log_prob(torch.zeros(prior.group_size(shape), dtype=torch.float64, device="cpu")))
    return lambda t: highest - float(prior.rate) * t.abs()


def variance_of_one(prior: Prior, shape: tuple[int, ...]) -> float:
    """That of one weight of a tensor of `shape`, all of which have the same."""
    if isinstance(prior, GroupLassoPrior):
        return (prior.group_size(shape) + 1.0) / float(prior.rate) ** 2
    return float(prior.bound(Layout.of({"weight": (1, 1)})).variance(torch.zeros(1, dtype=torch.float64, device="cpu")))


def variance_in_words(prior: Prior, shape: tuple[int, ...]) -> str:
    """One sentence on the variance of one weight of a tensor of `shape`."""
    value = variance_of_one(prior, shape)
    return f"One weight has variance {value:.6g}." if math.isfinite(value) else "One weight has no finite variance."
