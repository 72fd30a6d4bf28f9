"""Evidence by importance sampling, with Pareto-smoothed weights."""

import logging
import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from posterity.errors import positive_whole, shown
from posterity.evidence.elbo import in_blocks, log_likelihoods, whole
from posterity.model.joint import Joint
from posterity.model.problem import Problem
from posterity.numerics.random import Key
from posterity.posteriors.posterior import Posterior


class GeneralizedPareto(NamedTuple):
    """P(X > x) = (1 + shape x / scale)^(-1 / shape) for x >= 0; exponential at shape 0.

    Moments of order below 1 / shape exist; at a negative shape X is at most -scale / shape.

    >>> GeneralizedPareto(shape=0.0, scale=2.0).quantile(torch.tensor([0.5]))
    tensor([1.3863])
    """

    shape: float
    scale: float

    @classmethod
    def fit(cls, excesses: Tensor) -> "GeneralizedPareto":
        """From positive excesses (n,), n >= 2, by the empirical Bayes estimate of Zhang and Stephens (2009).

        With b = -shape / scale, the profile likelihood of b is averaged over a grid of about 30 + sqrt(n) values that
        covers its prior (30 where they have 20, as Vehtari et al., 2024, do).
        """
        values = excesses.to(torch.float64).sort().values
        count = len(values)
        points = 30 + int(count**0.5)
        grid = torch.arange(1, points + 1, dtype=torch.float64, device=values.device) - 0.5
        quartile = values[max(0, int(count / 4 + 0.5) - 1)]
        rates = 1.0 / values[-1] + (1.0 - (points / grid).sqrt()) / (3.0 * quartile)  # b, (points,)
        shapes = torch.log1p(-rates.unsqueeze(-1) * values).mean(-1)
        log_likelihood = count * ((-rates / shapes).log() - shapes - 1.0)
        rate = (rates * log_likelihood.softmax(0)).sum()
        shape = torch.log1p(-rate * values).mean()
        return cls(float(shape), float(-shape / rate))

    def quantile(self, probability: Tensor) -> Tensor:
        """The value below which X lies with these probabilities."""
        log_tail = torch.log1p(-probability)
        if self.shape == 0.0:
            return -self.scale * log_tail
        return self.scale * torch.expm1(-self.shape * log_tail) / self.shape


EQUAL = 1e-10  # relative differences of weights below which rounding makes them


class Smoothed(NamedTuple):
    """Log weights (S,), the largest of them smoothed, and k-hat."""

    log_weights: Tensor
    pareto_k: float


def pareto_smoothed(log_weights: Tensor, efficiency: float = 1.0) -> Smoothed:
    """Log weights with the M = min(S / 5, 3 sqrt(S / r)) largest replaced by quantiles of a fitted tail, and its shape.

    A generalised Pareto distribution is fitted to the excesses of the M largest weights over the next one (Vehtari et
    al., 2024, Pareto smoothed importance sampling); its shape is k-hat, drawn to 1/2 with the weight of ten draws as
    there. Its quantiles at (z - 1/2) / M take the place of the z-th of them, none above the largest weight. Weights
    that are equal up to rounding have k-hat -inf and stay as they are; so do those of which nearly all vanish beside
    the largest, whose k-hat is inf. `efficiency` r is that of draws of a chain: effective ones over all.

    >>> pareto_smoothed(torch.zeros(100)).pareto_k
    -inf
    """
    logs = log_weights.to(torch.float64)
    count, top = len(logs), logs.max()
    tail = math.ceil(min(count / 5, 3.0 * math.sqrt(count / efficiency)))
    order = logs.argsort()
    largest = order[-tail:]
    weights = (logs - top).exp()  # the largest is 1
    threshold = weights[order[-tail - 1]]
    excesses = weights[largest] - threshold
    if float(1.0 - threshold) <= EQUAL:
        return Smoothed(logs, -math.inf)
    excesses = excesses.clamp_min(torch.finfo(torch.float64).tiny)  # ties with the threshold
    fitted = GeneralizedPareto.fit(excesses)
    if not math.isfinite(fitted.shape) or not math.isfinite(fitted.scale):
        return Smoothed(logs, math.inf)
    shape = (tail * fitted.shape + 10 * 0.5) / (tail + 10)
    middles = (torch.arange(1, tail + 1, dtype=torch.float64, device=logs.device) - 0.5) / tail
    expected = threshold + GeneralizedPareto(shape, fitted.scale).quantile(middles)
    return Smoothed(logs.index_copy(0, largest, expected.log().clamp_max(0.0) + top), shape)


logger = logging.getLogger("posterity")

LEAST = 25  # draws: the largest fifth of fewer says nothing about a tail


@dataclass(frozen=True, eq=False)
class Importance:
    """A log evidence from log importance weights (S,) in float64, as they are and Pareto-smoothed.

    A weight is the joint density of data and draw over the density that drew it. `log_evidence` is the log of the mean
    weight; that mean is unbiased, its log on average too low. `smoothed_log_evidence` has expected order statistics in
    the place of the largest weights: a little biased, far less variable.
    """

    log_weights: Tensor

    @property
    def draws(self) -> int:
        """S."""
        return len(self.log_weights)

    @property
    def log_evidence(self) -> float:
        """log of the mean weight."""
        return _log_mean(self.log_weights)

    @property
    def standard_error(self) -> float:
        """Of `log_evidence`, by the delta method: std(w) / (mean(w) sqrt(S)). Not to be trusted above `threshold`."""
        return _relative_error(self.log_weights)

    @property
    def smoothed_log_evidence(self) -> float:
        """log of the mean smoothed weight."""
        return _log_mean(self._smoothed.log_weights)

    @property
    def smoothed_standard_error(self) -> float:
        """Of `smoothed_log_evidence`, by the delta method."""
        return _relative_error(self._smoothed.log_weights)

    @property
    def effective_draws(self) -> float:
        """(sum w)^2 / sum w^2 of the smoothed weights: as many equal ones would say as much."""
        logs = self._smoothed.log_weights
        return float((2.0 * logs.logsumexp(0) - (2.0 * logs).logsumexp(0)).exp())

    @property
    def pareto_k(self) -> float:
        """Shape k of the tail of the weights: moments of order below 1 / k exist; -inf for equal weights."""
        return self._smoothed.pareto_k

    @property
    def threshold(self) -> float:
        """The k-hat up to which as many draws give a usable estimate: min(1 - 1 / log10(S), 0.7)."""
        return min(1.0 - 1.0 / math.log10(self.draws), 0.7)

    @property
    def reliable(self) -> bool:
        """Whether k-hat is at most the threshold."""
        return self.pareto_k <= self.threshold

    @cached_property
    def _smoothed(self) -> Smoothed:
        return pareto_smoothed(self.log_weights)


def importance(posterior: Posterior, data: object, *, draws: int = 1000, seed: int = 0) -> Importance:
    """The log evidence by importance sampling from a posterior q with weights and a density.

    **Math**: p(D) = E_q[p(D, w) / q(w)], estimated by the mean over draws w_s ~ q. Under tempering p(D, w) is
    p(D | w)^lp p(w)^pp and the result its log normaliser.

    **Limit**: consistent where q covers the posterior. Whether it does is what k-hat says: above `threshold` (at most
    0.7) a warning is logged, and neither estimate nor standard error is to be trusted; below 0.5 the weights have a
    variance. Points enter with their log prior density, as in the log evidence of `Laplace`. Predictions of a
    `Linearized` posterior are no matter here: its weights go through the network itself.

    **Cost**: `draws` forward passes over the data.

    **References**: Vehtari, Simpson, Gelman, Yao and Gabry (2024), Pareto smoothed importance sampling.

    **Example**:

    >>> import posterity as po
    >>> x = torch.linspace(-1, 1, 10, dtype=torch.float64).unsqueeze(1)
    >>> linear = torch.nn.Linear(1, 1, dtype=torch.float64)
    >>> joint = po.Joint(linear, po.likelihoods.Gaussian(scale=0.5), po.priors.Normal(), num_data=10)
    >>> q, _ = po.infer(po.methods.Conjugate(), joint, (x, 2 * x))
    >>> abs(importance(q, (x, 2 * x)).log_evidence - float(q.log_evidence)) < 1e-8  # all weights are equal
    True
    """
    if not isinstance(posterior, Posterior):
        raise TypeError(f"importance: the first argument must be a posterior. Got {shown(posterior)}.")
    if posterior.num_members is not None:
        raise TypeError(
            f"importance: this holds {posterior.num_members} separate posteriors. Choose one: importance(q.member(0))."
        )
    _check_draws("importance", draws)
    joint, rows, logs = posterior.joint, whole(posterior.joint, data), []
    with torch.no_grad():
        for thetas in in_blocks(posterior.sample, draws, joint.size, Key(seed).fold("importance")):
            proposal = posterior.log_density(thetas)  # or a refusal, before the passes over the data
            likelihood = log_likelihoods(joint, thetas, rows, posterior.buffers)
            logs.append(_tempered(joint, thetas, likelihood) - proposal)
    return _told(
        "importance",
        torch.cat(logs),
        "Draw more, or take a wider posterior: one with correlations (Laplace with structure=Full() or Kronecker()), "
        "or train longer before Laplace.",
    )


def prior_monte_carlo(joint: Joint, data: object, *, draws: int = 10_000, seed: int = 0) -> Importance:
    """The log evidence by draws from the prior: p(D) = E_prior p(D | w), naive and unbiased.

    **Math**: log of the mean of p(D | w_s), w_s ~ prior; under tempering of p(D | w_s)^lp p(w_s)^(pp - 1).

    **Limit**: hopeless where the data say much: few draws, or none, fall where the posterior is. k-hat tells. Buffers
    (batch norm) are those of the network.

    **Cost**: `draws` forward passes over the data.

    **References**: Neal (2001), Annealed importance sampling, for importance sampling and its failures.

    **Example**:

    >>> import posterity as po
    >>> x = torch.ones(1, 1, dtype=torch.float64)
    >>> linear = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
    >>> joint = po.Joint(linear, po.likelihoods.Gaussian(scale=1.0), po.priors.Normal(), num_data=1)
    >>> of = prior_monte_carlo(joint, (x, x))  # N(1; 0, 2)
    >>> abs(of.log_evidence + 0.25 + 0.5 * math.log(4 * math.pi)) < 5 * of.standard_error
    True
    """
    if not isinstance(joint, Joint):
        raise TypeError(f"prior_monte_carlo needs a Joint, whose prior can be drawn from. Got {shown(joint)}.")
    if joint.num_members is not None:
        raise TypeError(f"prior_monte_carlo: this holds {joint.num_members} problems. Choose one: joint.member(0).")
    if joint.random_indices is not None or joint.likelihood.num_free:
        raise ValueError(
            "prior_monte_carlo needs a prior over all of theta. Got weights that are points, or learnt noise. "
            "Use random='*' and a fixed scale: joint.fitted(theta)."
        )
    _check_draws("prior_monte_carlo", draws)
    prior, rows, like, logs = joint.bound_prior, whole(joint, data), joint.initial(), []
    with torch.no_grad():
        for thetas in in_blocks(
            lambda count, key: prior.sample((count, joint.size), key, like),
            draws,
            joint.size,
            Key(seed).fold("prior Monte Carlo"),
        ):
            likelihood = log_likelihoods(joint, thetas, rows, {})
            logs.append(_tempered(joint, thetas, likelihood) - joint.log_prior(thetas.to(torch.float64)))
    return _told("prior_monte_carlo", torch.cat(logs), "Use importance(q, data) with the posterior q of Laplace.")


def _tempered(joint: Problem, thetas: Tensor, log_likelihood: Tensor) -> Tensor:
    """The log density whose normaliser is wanted, (S,) in float64."""
    powers = float(joint.tempering.likelihood_power), float(joint.tempering.prior_power)
    return powers[0] * log_likelihood + powers[1] * joint.log_prior(thetas.to(torch.float64))


def _check_draws(name: str, draws: int) -> None:
    positive_whole(f"{name}: draws", draws)
    if draws < LEAST:
        raise ValueError(f"{name}: draws must be at least {LEAST}, to see a tail of the weights. Got {draws}.")


def _told(name: str, log_weights: Tensor, advice: str) -> Importance:
    """The estimate, with a warning where it cannot be trusted."""
    if bool(torch.isnan(log_weights).any()) or not bool((log_weights > -math.inf).any()):
        raise FloatingPointError(
            f"{name}: the log weights are not finite. Got {int(torch.isnan(log_weights).sum())} NaN and "
            f"{int(log_weights.isinf().sum())} infinite ones among {len(log_weights)}. Look at the prior and the data."
        )
    found = Importance(log_weights)
    if not found.reliable:
        logger.warning(
            "%s: the tail of the weights has a Pareto k-hat of %.2f, above %.2f: the draws do not cover the posterior, "
            "and the log evidence is likely too low. %s",
            name,
            found.pareto_k,
            found.threshold,
            advice,
        )
    return found


def _log_mean(log_weights: Tensor) -> float:
    return float(log_weights.logsumexp(0)) - math.log(len(log_weights))


def _relative_error(log_weights: Tensor) -> float:
    """std(w) / (mean(w) sqrt(S))."""
    weights = (log_weights - log_weights.max()).exp()
    return float(weights.std() / weights.mean()) / math.sqrt(len(weights))
