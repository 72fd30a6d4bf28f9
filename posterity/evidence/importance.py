"""Evidence and leave-one-out cross-validation by importance sampling, with Pareto-smoothed weights."""

import logging
import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from posterity.errors import positive, positive_whole, shown
from posterity.evidence.elbo import in_blocks, log_likelihoods, whole
from posterity.model.joint import Joint
from posterity.model.problem import Problem
from posterity.model.scales import random_log_prior
from posterity.numerics.random import Key
from posterity.posteriors.posterior import Posterior
from posterity.posteriors.samples import Samples

logger = logging.getLogger("posterity")

EQUAL = 1e-10  # relative difference of weights that are equal up to rounding
LEAST = 25  # least draws whose largest fifth determines a tail


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
        """Fit to positive excesses (n,), n >= 2, by the empirical Bayes estimate of Zhang and Stephens (2009).

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
        """The quantiles at these probabilities."""
        log_tail = torch.log1p(-probability)
        if self.shape == 0.0:
            return -self.scale * log_tail
        return self.scale * torch.expm1(-self.shape * log_tail) / self.shape


class Smoothed(NamedTuple):
    """Pareto-smoothed log weights (S,), and k-hat."""

    log_weights: Tensor
    pareto_k: float


def pareto_smoothed(log_weights: Tensor, efficiency: float = 1.0) -> Smoothed:
    """Replace the M = min(S / 5, 3 sqrt(S / r)) largest weights by quantiles of a fitted tail; return its shape, too.

    A generalised Pareto distribution is fitted to the excesses of the M largest weights over the next one (Vehtari et
    al., 2024, Pareto smoothed importance sampling); its shape is k-hat, shrunk to 1/2 with the weight of ten draws as
    there. Its quantile at (z - 1/2) / M replaces the z-th of them, capped at the largest weight. Weights that are equal
    up to rounding are unchanged, with k-hat -inf; so are weights of which nearly all vanish beside the largest, with
    k-hat inf. `efficiency` r is the ratio of effective draws of a chain to all draws.

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
    if float(1.0 - threshold) <= EQUAL:
        return Smoothed(logs, -math.inf)
    excesses = (weights[largest] - threshold).clamp_min(torch.finfo(torch.float64).tiny)  # ties with the threshold
    fitted = GeneralizedPareto.fit(excesses)
    if not math.isfinite(fitted.shape) or not math.isfinite(fitted.scale):
        return Smoothed(logs, math.inf)
    shape = (tail * fitted.shape + 10 * 0.5) / (tail + 10)
    middles = (torch.arange(1, tail + 1, dtype=torch.float64, device=logs.device) - 0.5) / tail
    expected = threshold + GeneralizedPareto(shape, fitted.scale).quantile(middles)
    return Smoothed(logs.index_copy(0, largest, expected.log().clamp_max(0.0) + top), shape)


def _threshold(draws: int) -> float:
    """The k-hat up to which as many draws give a usable estimate (Vehtari et al., 2024)."""
    return min(1.0 - 1.0 / math.log10(draws), 0.7)


@dataclass(frozen=True, eq=False)
class Importance:
    """Estimates of the log evidence from log importance weights (S,) in float64, raw and Pareto-smoothed.

    A weight is the joint density of data and draw over the density of the proposal. `log_evidence` is the log of the
    mean weight; the mean is unbiased, its log on average too low. `smoothed_log_evidence` replaces the largest weights
    by expected order statistics: a little biased, far less variable.
    """

    log_weights: Tensor

    @property
    def draws(self) -> int:
        """Number S of draws."""
        return len(self.log_weights)

    @property
    def log_evidence(self) -> float:
        """log of the mean weight."""
        return _log_mean(self.log_weights)

    @property
    def standard_error(self) -> float:
        """Standard error of `log_evidence` by the delta method, std(w) / (mean(w) sqrt(S)); wrong above `threshold`."""
        return _relative_error(self.log_weights)

    @property
    def smoothed_log_evidence(self) -> float:
        """log of the mean smoothed weight."""
        return _log_mean(self._smoothed.log_weights)

    @property
    def smoothed_standard_error(self) -> float:
        """Standard error of `smoothed_log_evidence`, by the delta method."""
        return _relative_error(self._smoothed.log_weights)

    @property
    def effective_draws(self) -> float:
        """Effective sample size (sum w)^2 / sum w^2 of the smoothed weights."""
        logs = self._smoothed.log_weights
        return float((2.0 * logs.logsumexp(0) - (2.0 * logs).logsumexp(0)).exp())

    @property
    def pareto_k(self) -> float:
        """Shape k of the tail of the weights: moments of order below 1 / k exist; -inf for equal weights."""
        return self._smoothed.pareto_k

    @property
    def threshold(self) -> float:
        """The k-hat up to which the estimate is usable: min(1 - 1 / log10(S), 0.7)."""
        return _threshold(self.draws)

    @property
    def reliable(self) -> bool:
        """Whether k-hat is at most the threshold."""
        return self.pareto_k <= self.threshold

    @cached_property
    def _smoothed(self) -> Smoothed:
        return pareto_smoothed(self.log_weights)


def importance(posterior: Posterior, data: object, *, draws: int = 1000, seed: int = 0) -> Importance:
    """Estimate the log evidence by importance sampling from a posterior q with a density over weights.

    **Math**: p(D) = E_q[p(D, w) / q(w)], estimated by the mean over draws w_s ~ q. Under tempering p(D, w) is
    p(D | w)^lp p(w)^pp and the result its log normaliser.

    **Limit**: consistent where q covers the posterior, which k-hat measures: above `threshold` (at most 0.7) a warning
    is logged, and neither estimate nor standard error is reliable; below 0.5 the weights have a variance. Points enter
    with their log prior density, as in the log evidence of `Laplace`. The weights of a `Linearized` posterior go
    through the network itself.

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
            proposal = posterior.log_density(thetas)  # raises before the passes over the data
            likelihood = log_likelihoods(joint, thetas, rows, posterior.buffers)
            logs.append(_tempered(joint, thetas, likelihood) - proposal)
    advice = (
        "Draw more, or take a wider posterior: one with correlations (Laplace with structure=Full() or Kronecker()), "
        "or train longer before Laplace."
    )
    return _checked("importance", torch.cat(logs), advice)


def prior_monte_carlo(joint: Joint, data: object, *, draws: int = 10_000, seed: int = 0) -> Importance:
    """Estimate the log evidence by draws from the prior, p(D) = E_prior p(D | w): unbiased, with a large variance.

    **Math**: log of the mean of p(D | w_s), w_s ~ prior; under tempering of p(D | w_s)^lp p(w_s)^(pp - 1).

    **Limit**: useless where the data are informative: few draws, or none, fall where the posterior is, which k-hat
    shows. Buffers (batch norm) come from the network.

    **Cost**: `draws` forward passes over the data.

    **References**: Neal (2001), Annealed importance sampling, for importance sampling and its failures.

    **Example**:

    >>> import posterity as po
    >>> x = torch.ones(1, 1, dtype=torch.float64)
    >>> linear = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
    >>> joint = po.Joint(linear, po.likelihoods.Gaussian(scale=1.0), po.priors.Normal(), num_data=1)
    >>> estimate = prior_monte_carlo(joint, (x, x))  # N(1; 0, 2)
    >>> abs(estimate.log_evidence + 0.25 + 0.5 * math.log(4 * math.pi)) < 5 * estimate.standard_error
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

    def sample(count: int, key: Key) -> Tensor:
        return prior.sample((count, joint.size), key, like)

    with torch.no_grad():
        for thetas in in_blocks(sample, draws, joint.size, Key(seed).fold("prior Monte Carlo")):
            likelihood = log_likelihoods(joint, thetas, rows, {})
            logs.append(_tempered(joint, thetas, likelihood) - joint.log_prior(thetas.to(torch.float64)))
    return _checked("prior_monte_carlo", torch.cat(logs), "Use importance(q, data) with the posterior q of Laplace.")


def _tempered(joint: Problem, thetas: Tensor, log_likelihood: Tensor) -> Tensor:
    """The tempered log joint density, (S,) in float64."""
    tempering, log_prior = joint.tempering, random_log_prior(joint, thetas.to(torch.float64))
    return float(tempering.likelihood_power) * log_likelihood + float(tempering.prior_power) * log_prior


def _check_draws(name: str, draws: int) -> None:
    positive_whole(f"{name}: draws", draws)
    if draws < LEAST:
        raise ValueError(f"{name}: draws must be at least {LEAST}, to see a tail of the weights. Got {draws}.")


def _checked(name: str, log_weights: Tensor, advice: str) -> Importance:
    """Return the estimate; warn where it is not reliable, raise where weights are not finite."""
    if bool(torch.isnan(log_weights).any()) or not bool((log_weights > -math.inf).any()):
        raise FloatingPointError(
            f"{name}: the log weights are not finite. Got {int(torch.isnan(log_weights).sum())} NaN and "
            f"{int(log_weights.isinf().sum())} infinite ones among {len(log_weights)}. Look at the prior and the data."
        )
    estimate = Importance(log_weights)
    if not estimate.reliable:
        logger.warning(
            "%s: the tail of the weights has a Pareto k-hat of %.2f, above %.2f: the draws do not cover the posterior, "
            "and the log evidence is likely too low. %s",
            name,
            estimate.pareto_k,
            estimate.threshold,
            advice,
        )
    return estimate


def _log_mean(log_weights: Tensor) -> float:
    return float(log_weights.logsumexp(0)) - math.log(len(log_weights))


def _relative_error(log_weights: Tensor) -> float:
    """std(w) / (mean(w) sqrt(S))."""
    weights = (log_weights - log_weights.max()).exp()
    return float(weights.std() / weights.mean()) / math.sqrt(len(weights))


@dataclass(frozen=True, eq=False)
class LeaveOneOut:
    """Leave-one-out estimate of the expected log predictive density from S draws, row by row, in float64.

    `pointwise` (N,) is log p(y_n | all other rows), `in_sample` (N,) is log p(y_n | all rows), `pareto_k` (N,) the
    tail shape k-hat of each row's weights.
    """

    pointwise: Tensor
    in_sample: Tensor
    pareto_k: Tensor
    draws: int

    @property
    def elpd(self) -> float:
        """Sum of `pointwise` over the rows, in nats; higher is better."""
        return float(self.pointwise.sum())

    @property
    def standard_error(self) -> float:
        """Standard error of `elpd` for new rows: sqrt(N) times the standard deviation of the terms (divisor N)."""
        return math.sqrt(len(self.pointwise)) * float(self.pointwise.std(correction=0))

    @property
    def effective_parameters(self) -> float:
        """Effective number of parameters p_loo: the sum of `in_sample` - `pointwise`."""
        return float((self.in_sample - self.pointwise).sum())

    @property
    def threshold(self) -> float:
        """The k-hat up to which a term is usable: min(1 - 1 / log10(S), 0.7)."""
        return _threshold(self.draws)

    @property
    def unreliable(self) -> Tensor:
        """Indices (K,) of the rows whose k-hat is above the threshold."""
        return (self.pareto_k > self.threshold).nonzero().flatten()

    def __str__(self) -> str:
        return (
            f"elpd {self.elpd:.2f} with standard error {self.standard_error:.2f}, effective parameters "
            f"{self.effective_parameters:.2f}, {len(self.unreliable):,} of {len(self.pointwise):,} rows with a k-hat "
            f"above {self.threshold:.2f}."
        )


def leave_one_out(posterior: Samples, data: object = None, *, efficiency: float = 1.0) -> LeaveOneOut:
    """Leave-one-out cross-validation by Pareto-smoothed importance sampling, without refitting.

    `data` are the rows that the posterior was fitted to; None for a `Density`, which has its own `pointwise`.
    `efficiency` is the ratio of effective draws to all draws.

    **Math**: p(y_n | y_-n) = 1 / E[1 / p(y_n | theta)], the expectation over the posterior of all rows. With weights
    w_s = 1 / p(y_n | theta_s), smoothed, it is sum_s w_s p(y_n | theta_s) / sum_s w_s.

    **Limit**: accurate where no single row moves the posterior much; rows with a k-hat above `threshold` are named in
    a warning. Rows must be independent given theta, and the posterior untempered.

    **Cost**: one pass over the data for each draw, and a fit of two numbers for each row.

    **References**: Vehtari, Gelman and Gabry (2017), Practical Bayesian model evaluation using leave-one-out
    cross-validation and WAIC; Vehtari et al. (2024), Pareto smoothed importance sampling.

    **Example**:

    >>> import posterity as po
    >>> y = torch.tensor([-1.0, 0.0, 1.0])
    >>> density = po.Density(  # the mean of three normal numbers
    ...     lambda mean: -0.5 * (y - mean).square().sum(),
    ...     {"mean": ()},
    ...     pointwise=lambda mean: -0.5 * (y - mean).square() - 0.5 * math.log(2 * math.pi),
    ... )
    >>> exact = po.Key(0).normal((1, 20_000, 1), torch.float32) / math.sqrt(3)
    >>> loo = leave_one_out(Samples(density, exact))
    >>> abs(loo.pointwise[1].item() + 0.5 * math.log(3 * math.pi)) < 0.01  # N(0; 0, 1 + 1/2)
    True
    """
    if not isinstance(posterior, Samples):
        raise TypeError(
            f"leave_one_out needs the draws of chains (Samples). Got {shown(posterior)}. For others make them: "
            "Samples(q.joint, q.sample(1000, key).unsqueeze(0))."
        )
    positive("leave_one_out: efficiency", efficiency)
    if not all(float(power) == 1.0 for power in posterior.joint.powers):
        raise ValueError("leave_one_out needs an untempered posterior. Got another tempering. Fit it without.")
    logs = posterior.log_likelihoods(data).flatten(0, 1).T.contiguous()  # (N, S)
    count = logs.shape[1]
    if count < LEAST:
        raise ValueError(f"leave_one_out needs {LEAST} draws or more, to see a tail of the weights. Got {count}.")
    smoothed = [pareto_smoothed(-row, efficiency) for row in logs]
    weights = torch.stack([row.log_weights for row in smoothed])
    pointwise = (weights + logs).logsumexp(1) - weights.logsumexp(1)
    pareto_k = torch.tensor([row.pareto_k for row in smoothed], dtype=torch.float64, device="cpu")
    result = LeaveOneOut(pointwise, logs.logsumexp(1) - math.log(count), pareto_k, count)
    if len(result.unreliable):
        logger.warning(
            "leave_one_out: of %d rows, %d have a Pareto k-hat above %.2f, so their terms are not to be trusted: %s. "
            "Fit again without these rows, or take a likelihood that they surprise less (StudentT).",
            len(pointwise),
            len(result.unreliable),
            result.threshold,
            shown(result.unreliable.tolist()),
        )
    return result
