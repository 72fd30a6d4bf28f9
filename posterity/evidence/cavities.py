"""Approximate leave-one-out predictions from a Laplace posterior, and scales of prior and noise chosen by them."""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from posterity.errors import NotPositiveDefinite, positive, positive_whole
from posterity.evidence.marginal import GIVEN, Groups, LeftOut, Marginal, Shared
from posterity.evidence.retuned import marginal_likelihood
from posterity.evidence.tuning import Search, Tuned, with_tuned
from posterity.likelihoods import Gaussian as GaussianNoise
from posterity.likelihoods import Likelihood
from posterity.model.batch import Batch
from posterity.model.weights import entry_weights, output_weights, weighted_log_prob, with_targets
from posterity.numerics.random import Key
from posterity.posteriors.linearized import Linearized
from posterity.predictive.probit import default_integrator

logger = logging.getLogger("posterity")

LEAVE_ONE_OUT = "leave-one-out"
_LARGEST = 0.999  # leverage above which a cavity counts as undefined
DECADES = 6  # of the prior precision, by which a posterior at a mode is narrowed at most
_MOST = 0.5  # share of undefined cavities from which a precision is not considered


class LeftOutRows(NamedTuple):
    """Leave-one-out log densities of rows (n,); NaN for rows whose cavity is undefined.

    `posterior` integrates over the outputs of the cavity, `plug_in` takes their mean. `weights` (n,) are the weights
    of the rows, None where all are alike.
    """

    posterior: Tensor
    plug_in: Tensor
    weights: Tensor | None = None

    @property
    def undefined(self) -> int:
        """The number of rows without a prediction."""
        return int(self.posterior.isnan().sum())

    @property
    def cost(self) -> float:
        """Mean log density lost by the posterior's width (nats per row); inf if most rows have no prediction."""
        few = self.undefined > _MOST * len(self.posterior)
        return math.inf if few else _mean(self.plug_in - self.posterior, self.weights)

    def surely_cost_more_than(self, nats: float) -> bool:
        """Return whether the cost exceeds this many nats, and two of its standard errors."""
        return self.cost > max(nats, 2.0 * _error(self.plug_in - self.posterior, self.weights))


def left_out_rows(
    posterior: Linearized, rows: Batch, *, at_mode: bool = True, moments: tuple[Tensor, Tensor] | None = None
) -> LeftOutRows:
    """Predict each row by the posterior without the row's own site.

    With outputs f ~ N(m, S) of a row, and gradient g and curvature H of its log-likelihood at m, the cavity has
    covariance (S^-1 - H)^-1 = (1 - S H)^-1 S and mean m minus that times g. It is undefined where the leverage, the
    largest eigenvalue of S H, is 1 or more, as structures that leave out correlations can have it: those rows are
    left out. Weights that are not `at_mode`, but were trained by another loss, do not move by g: their cavities keep
    the mean m. A row counts as often as its weight says, which must be the one that it had in the fit. `moments` are m
    and S of all rows, if they are known.
    """
    likelihood = posterior.joint.as_joint("left_out_rows").likelihood
    centre, covariance = _cavities(posterior, rows, at_mode, moments)
    defined = ~covariance[:, 0, 0].isnan()
    each = torch.full((2, len(centre)), math.nan, dtype=centre.dtype, device=centre.device)
    each[0] = _densities(likelihood, centre, covariance, rows)
    each[1, defined] = likelihood.log_prob(centre[defined], _targets(rows)[defined])
    return LeftOutRows(each[0], each[1], _row_weights(rows))


def _cavities(
    posterior: Linearized, rows: Batch, at_mode: bool, moments: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor]:
    """Means (n, *event) and covariances (n, D, D) of the cavities of `left_out_rows`; NaN where one is undefined."""
    joint = posterior.joint.as_joint("left_out_rows")
    mean, covariance = (v.double() for v in (posterior.output_moments(rows.inputs) if moments is None else moments))
    leaf = mean.clone().requires_grad_()
    weights = entry_weights(joint.likelihood, rows, mean.dtype)
    with torch.enable_grad():
        (slope,) = torch.autograd.grad(weighted_log_prob(joint.likelihood, leaf, _targets(rows), weights).sum(), leaf)
    curvature = joint.likelihood.output_fisher(mean, mean.dim() - 1) * float(joint.tempering.likelihood_power)
    if weights is not None:
        root = output_weights(joint.likelihood, weights, mean).sqrt().expand_as(mean).reshape(len(mean), -1)
        curvature = curvature * (root.unsqueeze(-1) * root.unsqueeze(-2))
    hat = covariance @ curvature  # (n, D, D)
    defined = torch.linalg.eigvals(hat).real.amax(-1) < _LARGEST
    identity = torch.eye(hat.shape[-1], dtype=hat.dtype, device=hat.device)
    solved = torch.linalg.solve(identity - hat[defined], covariance[defined])
    centre, cavity = torch.full_like(mean, math.nan), torch.full_like(covariance, math.nan)
    cavity[defined] = 0.5 * (solved + solved.mT)
    shift = (cavity @ slope.reshape(len(slope), -1, 1)).squeeze(-1).reshape(mean.shape)[defined]
    centre[defined] = mean[defined] - at_mode * shift
    return centre, cavity


def _densities(likelihood: Likelihood, centre: Tensor, covariance: Tensor, rows: Batch) -> Tensor:
    """Log densities (n,) of the rows under outputs N(centre, covariance); NaN where these are."""
    defined = ~(covariance[:, 0, 0].isnan() | centre.reshape(len(centre), -1).isnan().any(1))
    centre, covariance, targets = centre[defined], covariance[defined], _targets(rows)[defined]
    each = torch.full((len(defined),), math.nan, dtype=centre.dtype, device=centre.device)
    each[defined] = default_integrator(likelihood, centre)(likelihood, centre, covariance, Key(0)).log_prob(targets)
    return each


def _targets(rows: Batch) -> Tensor:
    return rows.targets.double() if rows.targets.is_floating_point() else rows.targets


def _row_weights(rows: Batch) -> Tensor | None:
    """Return the weights (n,) of the rows: where entries have weights, the mean of the row's nonzero ones."""
    weights = None if rows.weights is None else rows.weights.double()
    if weights is None or weights.dim() == 1:
        return weights
    entries = weights.flatten(1)
    return entries.sum(1) / entries.count_nonzero(1).clamp_min(1)


def _mean(each: Tensor, weights: Tensor | None) -> float:
    """Return the weighted mean of these numbers (n,), without NaN."""
    if weights is None:
        return float(each.nanmean())
    kept = ~each.isnan()
    return float((weights[kept] * each[kept]).sum() / weights[kept].sum())


def _error(each: Tensor, weights: Tensor | None) -> float:
    """Return the standard error of `_mean`."""
    kept = ~each.isnan()
    count = int(kept.sum())
    if count < 2:
        return 0.0
    if weights is None:
        return float(each[kept].std()) / math.sqrt(count)
    share = weights[kept] / weights[kept].sum()
    spread = (share * (each[kept] - _mean(each, weights))).square().sum() * count / (count - 1)
    return math.sqrt(float(spread))


@dataclass(frozen=True)
class PredictiveFit:
    """Choose the prior precision of a network that was trained elsewhere by how its posterior predicts.

    **Math**: the smallest precision alpha, and with it the widest posterior, whose width costs at most `tolerance`
    nats a row. On held-out rows (`chosen_on`) the cost is the loss of the posterior less the least of all alpha. Else
    (`by_cavities`) each of `rows` training rows is predicted without its own site (`left_out_rows`), and the cost is
    the loss of the posterior less that of the cavity's mean: what the row does to the mean counts on both sides.
    Noise that was left out is RSS / (N - gamma) at each alpha, gamma the effective number of weights. Where some
    tensors have a prior that was given and others do not, the given ones stay.

    **Limit**: predictions are at the weights as they are, whatever loss they were trained by. A network that has
    learnt its rows by heart looks sure of them without their sites, too, so that the posterior comes out narrower
    than is best: held-out rows say more.

    **Cost**: some ten predictions of the rows.

    **References**: Vehtari et al. (2016), Bayesian leave-one-out cross-validation approximations for Gaussian latent
    variable models; Daxberger et al. (2021), Laplace redux.

    **Example**:

    >>> PredictiveFit().tolerance
    0.001
    """

    rows: int = 500
    tolerance: float = 0.001
    lowest: float = 1e-6
    highest: float = 1e12

    def __post_init__(self) -> None:
        positive_whole("PredictiveFit.rows", self.rows)
        for name in ("tolerance", "lowest", "highest"):
            positive(f"PredictiveFit.{name}", getattr(self, name))

    def by_cavities(self, posterior: Linearized, rows: Batch, *, at_mode: bool) -> Linearized:
        """Return the posterior at the prior precision chosen by leave-one-out predictions of training rows."""
        undefined, moments = 0, posterior.output_moments_under(rows.inputs)

        def cost(trial: Linearized) -> float:
            nonlocal undefined
            left = left_out_rows(trial, rows, at_mode=at_mode, moments=moments(trial))
            undefined = max(undefined, left.undefined)
            return left.cost

        chosen = self._chosen(posterior, cost, LEAVE_ONE_OUT)
        if undefined:
            logger.info(
                "%d of %d rows have no leave-one-out prediction at a precision that was tried.", undefined, rows.size
            )
        return chosen

    def narrowed(self, posterior: Linearized, rows: Batch) -> Linearized:
        """The posterior at a mode, or a narrower one about it, where that surely predicts left-out rows better.

        A row that is left out moves the mode by the cavity of this posterior; its own width is tried along with those
        of larger precisions, decade by decade, and with none. Where the best is better by more than `tolerance` and by
        more than a standard error, the widest that is within `tolerance` of the best is taken. Gaussians at the mode
        for classes are often too wide: towards smaller weights the likelihood falls faster than they do.
        """
        moments = posterior.output_moments_under(rows.inputs)
        centre, covariance = _cavities(posterior, rows, True, moments(posterior))
        likelihood = posterior.joint.as_joint("PredictiveFit").likelihood
        groups, marginal, given = _prior_groups(posterior)
        present = marginal.prior_precision

        def at(log: float) -> Linearized:
            return _at(posterior, marginal, groups, torch.where(given, present, present * 10.0**log), LEAVE_ONE_OUT)

        def densities(log: float) -> Tensor:
            trial = at(log)
            width = _cavities(trial, rows, True, moments(trial))[1]
            return _densities(trial.joint.as_joint("PredictiveFit").likelihood, centre, width, rows)

        own = _densities(likelihood, centre, covariance, rows)
        none = torch.full_like(own, math.nan)
        none[~own.isnan()] = likelihood.log_prob(centre[~own.isnan()], _targets(rows)[~own.isnan()])
        tried = [own, *(densities(float(log)) for log in range(1, DECADES + 1))]
        weights = _row_weights(rows)
        means = [_mean(each, weights) for each in tried]
        best = max(*tried, none, key=lambda each: _mean(each, weights))
        excess = _mean(best - own, weights)
        if not excess > max(self.tolerance, _error(best - own, weights)):
            return posterior
        enough = _mean(best, weights) - self.tolerance
        good = next((float(log) for log, mean in enumerate(means) if mean >= enough), float(DECADES))
        bad = good - 1.0
        for _ in range(3):
            middle = 0.5 * (good + bad)
            good, bad = (middle, bad) if _mean(densities(middle), weights) >= enough else (good, middle)
        return at(good)

    def chosen_on(self, posterior: Linearized, rows: Batch) -> Linearized:
        """Return the posterior at the prior precision chosen by the predictions of held-out rows."""
        joint = posterior.joint.as_joint("PredictiveFit")
        rows = with_targets(joint.likelihood, rows)
        outputs = joint.outputs(posterior.point(), rows.inputs, posterior.buffers or None)
        weights = _row_weights(rows)
        losses = [-_mean(joint.likelihood.log_prob(outputs, rows.targets), weights)]  # without any width

        def cost(trial: Linearized) -> float:
            losses.append(-_mean(trial.predict(rows.inputs).log_prob(rows.targets), weights))
            return losses[-1] - min(losses)

        return self._chosen(posterior, cost, "validation")

    def _chosen(self, posterior: Linearized, cost: Callable[[Linearized], float], way: str) -> Linearized:
        """Walk down in decades from where the posterior has no width, while the cost allows, and halve the last one."""
        groups, marginal, given = _prior_groups(posterior)

        def at(log: float) -> Linearized:
            precision = marginal.prior_precision.masked_fill(~given, 10.0**log)
            return _at(posterior, marginal, groups, precision, way)

        first, last = math.log10(self.lowest), math.log10(self.highest)
        rest = cost(at(last)) if bool(given.any()) else 0.0  # what the width of the weights that stay costs
        limit = self.tolerance + (max(0.0, rest) if math.isfinite(rest) else 0.0)

        def allowed(log: float) -> bool:
            try:
                return cost(at(log)) <= limit
            except (NotPositiveDefinite, FloatingPointError):
                return False

        good = min(max(math.ceil(math.log10(float(marginal.prior_precision[~given][0]))) + 2.0, first), last)
        while good < last and not allowed(good):
            good += 1.0
        while good > first and allowed(good - 1.0):
            good -= 1.0
        bad = good - 1.0
        for _ in range(3 if first < good < last else 0):
            middle = 0.5 * (good + bad)
            good, bad = (middle, bad) if allowed(middle) else (good, middle)
        if not first < good < last:
            logger.warning("The prior precision chosen by %s, %.3g, is at the end of its range.", way, 10.0**good)
        return at(good)


def with_noise(posterior: Linearized) -> Linearized:
    """Return the posterior with left-out noise at its fixed point RSS / (N - gamma), under an unchanged prior."""
    marginal = marginal_likelihood(posterior, Shared())
    return _at(posterior, marginal, Shared(), marginal.prior_precision, "evidence")


def _prior_groups(posterior: Linearized) -> tuple[Groups, Marginal, Tensor]:
    """Return the groups of weights with left-out and with given scales, the evidence, and the mask of given ones."""
    joint = posterior.joint.as_joint("PredictiveFit")
    layout = joint.network.layout
    named = [p.name for p, prior in zip(layout, joint.prior.by_tensor(layout), strict=True) if prior.chosen]
    groups: Groups = LeftOut(Shared(), tuple(named)) if 0 < len(named) < len(layout.names) else Shared()
    marginal = marginal_likelihood(posterior, groups)
    given = torch.tensor([name == GIVEN for name in marginal.names], device=marginal.prior_precision.device)
    return groups, marginal, given


def _at(posterior: Linearized, marginal: Marginal, groups: Groups, precision: Tensor, way: str) -> Linearized:
    """Return the posterior at these prior precisions (G,), with left-out noise at its fixed point."""
    joint = posterior.joint.as_joint("PredictiveFit")
    noise = None if marginal.noise is None else marginal.noise.scale
    if marginal.noise is not None and isinstance(joint.likelihood, GaussianNoise) and joint.likelihood.chosen:
        search, scale = Search(marginal, noise=True), marginal.noise.scale
        for _ in range(20):
            point = search.at(torch.cat([precision.log(), precision.new_tensor([-2.0 * math.log(scale)])]))
            if point is None or float(point.gained[-1]) <= 0.0:
                break
            after = math.sqrt(marginal.likelihood_power * marginal.noise.squares / float(point.gained[-1]))
            scale, before = after, scale
            if abs(after - before) <= 1e-3 * before:
                break
        noise = scale
    tuned = Tuned(groups, marginal.names, precision, noise, math.nan, math.nan, 1)
    return posterior.with_gaussian(with_tuned(posterior.gaussian, marginal, tuned, way))
