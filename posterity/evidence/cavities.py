"""Approximate leave-one-out predictions from a Laplace posterior, and scales of prior and noise chosen by them."""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from posterity.errors import NotPositiveDefinite, positive, positive_whole
from posterity.evidence.marginal import Marginal, Shared
from posterity.evidence.retuned import marginal_likelihood
from posterity.evidence.tuning import Search, Tuned, with_tuned
from posterity.likelihoods import Gaussian as GaussianNoise
from posterity.model.batch import Batch
from posterity.numerics.random import Key
from posterity.posteriors.gaussian import Linearized
from posterity.posteriors.posterior import default_integrator

logger = logging.getLogger("posterity")

LEAVE_ONE_OUT = "leave-one-out"
_LARGEST = 0.999  # leverage from which a cavity counts as undefined
_MOST = 0.5  # share of undefined cavities from which a precision is not considered


class LeftOutRows(NamedTuple):
    """Log densities of rows (n,) under predictions that have not seen them; NaN where a cavity is undefined.

    `posterior` integrates over the outputs of the cavity, `plug_in` takes their mean.
    """

    posterior: Tensor
    plug_in: Tensor

    @property
    def undefined(self) -> int:
        """The number of rows without a prediction."""
        return int(self.posterior.isnan().sum())

    @property
    def loss(self) -> float:
        """Mean negative log density under the posterior; infinite where most cavities are undefined."""
        few = self.undefined > _MOST * len(self.posterior)
        return math.inf if few else -float(self.posterior.nanmean())


def left_out_rows(posterior: Linearized, rows: Batch) -> LeftOutRows:
    """Predict each row by the posterior without the row's own site, at weights that are taken to be a mode.

    With outputs f ~ N(m, S) of a row, and gradient g and curvature H of its log-likelihood at m, the cavity has
    covariance (S^-1 - H)^-1 = (1 - S H)^-1 S and mean m minus that times g. It is undefined where the leverage, the
    largest eigenvalue of S H, is 1 or more, as structures that leave out correlations can have it: those rows are
    left out.
    """
    joint = posterior.joint.as_joint("left_out_rows")
    likelihood, targets = joint.likelihood, rows.targets
    mean, covariance = (value.double() for value in posterior.output_moments(rows.inputs))
    targets = targets.double() if targets.is_floating_point() else targets
    leaf = mean.clone().requires_grad_()
    with torch.enable_grad():
        (slope,) = torch.autograd.grad(likelihood.log_prob(leaf, targets).sum(), leaf)
    curvature = likelihood.output_fisher(mean, mean.dim() - 1) * float(joint.tempering.likelihood_power)
    hat = covariance @ curvature  # (n, D, D)
    leverage = torch.linalg.eigvals(hat).real.amax(-1)
    defined = leverage < _LARGEST
    identity = torch.eye(hat.shape[-1], dtype=hat.dtype, device=hat.device)
    cavity = torch.linalg.solve(identity - hat[defined], covariance[defined])
    cavity = 0.5 * (cavity + cavity.mT)
    shift = (cavity @ slope[defined].flatten(1).unsqueeze(-1)).squeeze(-1)
    centre, targets = mean[defined] - shift.reshape(mean[defined].shape), targets[defined]
    each = torch.full((2, len(mean)), math.nan, dtype=mean.dtype, device=mean.device)
    each[0, defined] = default_integrator(likelihood, centre)(likelihood, centre, cavity, Key(0)).log_prob(targets)
    each[1, defined] = likelihood.log_prob(centre, targets)
    return LeftOutRows(*each)


@dataclass(frozen=True)
class PredictiveFit:
    """Choose the prior precision of a network that was trained elsewhere by how its posterior predicts.

    **Math**: the smallest precision alpha, and with it the widest posterior, whose predictions cost at most
    `tolerance` nats a row against the best. Predictions are scored on rows that were held out (`chosen_on`), or else
    by cavities: each of `rows` training rows is predicted without its own site (`left_out_rows`). Noise that was left
    out is RSS / (N - gamma) at each alpha, gamma the effective number of weights.

    **Limit**: the weights count as a mode, whatever loss they were trained by: the prior is taken to pull nowhere.
    A network that has learnt its rows by heart looks sure of them without its site, too: held-out rows say more.

    **Cost**: some ten predictions of the rows.

    **References**: Vehtari et al. (2016), Bayesian leave-one-out cross-validation approximations for Gaussian latent
    variable models; Daxberger et al. (2021), Laplace redux.

    **Example**:

    >>> PredictiveFit().tolerance
    0.003
    """

    rows: int = 500
    tolerance: float = 0.003
    lowest: float = 1e-6
    highest: float = 1e12

    def __post_init__(self) -> None:
        positive_whole("PredictiveFit.rows", self.rows)
        for name in ("tolerance", "lowest", "highest"):
            positive(f"PredictiveFit.{name}", getattr(self, name))

    def by_cavities(self, posterior: Linearized, rows: Batch) -> Linearized:
        """The posterior at the precision chosen by leave-one-out predictions of training rows."""
        left: dict[float, LeftOutRows] = {}

        def loss(alpha: float, trial: Linearized) -> float:
            left[alpha] = left_out_rows(trial, rows)
            return left[alpha].loss

        chosen, alpha = self._chosen(posterior, loss, LEAVE_ONE_OUT)
        if alpha in left and left[alpha].undefined:
            logger.info("%d of %d rows have no leave-one-out prediction.", left[alpha].undefined, rows.size)
        return chosen

    def chosen_on(self, posterior: Linearized, rows: Batch) -> Linearized:
        """The posterior at the precision chosen by the predictions of held-out rows."""

        def loss(_: float, trial: Linearized) -> float:
            return -float(trial.predict(rows.inputs).log_prob(rows.targets).mean())

        return self._chosen(posterior, loss, "validation")[0]

    def _chosen(
        self, posterior: Linearized, loss: Callable[[float, Linearized], float], way: str
    ) -> tuple[Linearized, float]:
        """Walk in decades to where the loss begins to rise by more than the tolerance, and halve the last decade."""
        marginal = marginal_likelihood(posterior, Shared())
        losses: dict[float, float] = {}

        def at(alpha: float) -> Linearized:
            return _at(posterior, marginal, alpha, way)

        def cost(log: float) -> float:
            if log not in losses:
                try:
                    value = loss(10.0**log, at(10.0**log))
                except (NotPositiveDefinite, FloatingPointError):
                    value = math.inf
                losses[log] = math.inf if math.isnan(value) else value
            return losses[log]

        first, last = math.log10(self.lowest), math.log10(self.highest)
        high = min(max(math.log10(float(marginal.prior_precision[0])) + 2.0, first), last)
        while high < last and (not math.isfinite(cost(high)) or cost(high) > cost(high + 1.0) + 0.5 * self.tolerance):
            high += 1.0
        low = high
        while low > first and cost(low - 1.0) <= min(losses.values()) + self.tolerance:
            low -= 1.0
        if low > first:
            bad = low - 1.0
            for _ in range(3):
                middle = 0.5 * (low + bad)
                low, bad = (middle, bad) if cost(middle) <= min(losses.values()) + self.tolerance else (low, middle)
        least = min(cost(low), *losses.values())
        low = low if cost(low) <= least + self.tolerance else min(losses, key=losses.__getitem__)
        if not first < low < last:
            logger.warning("The prior precision chosen by %s, %.3g, is at the end of its range.", way, 10.0**low)
        return at(10.0**low), 10.0**low


def _at(posterior: Linearized, marginal: Marginal, alpha: float, way: str) -> Linearized:
    """The posterior at this prior precision, and with noise that was left out at its fixed point there."""
    precision = marginal.prior_precision.new_tensor([alpha])
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
    tuned = Tuned(Shared(), marginal.names, precision, noise, math.nan, math.nan, 1)
    return posterior.with_gaussian(with_tuned(posterior.gaussian, marginal, tuned, way))


def harm(posterior: Linearized, rows: Batch) -> float:
    """Nats a row by which leave-one-out predictions are worse than those of the weights alone; negative: better."""
    left = left_out_rows(posterior, rows)
    if not math.isfinite(left.loss):
        return math.nan
    return float((left.plug_in - left.posterior).nanmean())
