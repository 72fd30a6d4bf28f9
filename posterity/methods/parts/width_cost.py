"""What the width of a posterior costs: does it predict worse than its mean? Warnings, and a narrower prior."""

import logging
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from posterity.errors import PosterityError
from posterity.evidence import Evidence, residual_sums, retuned
from posterity.evidence.cavities import PredictiveFit, left_out_rows, with_noise
from posterity.likelihoods import Gaussian as GaussianNoise
from posterity.methods.parts.linear_model import is_linear
from posterity.model import Batch, Buffers, Data, Joint, Problem
from posterity.model.data import NoData
from posterity.model.scales import leaves_out
from posterity.model.weights import row_weights, with_targets
from posterity.numerics.random import Key
from posterity.options import LEFT_OUT
from posterity.posteriors import Linearized, Posterior
from posterity.precisions.dense import Dense
from posterity.priors import Normal

logger = logging.getLogger("posterity")

HARM = 0.005  # nats a row that the width of a posterior may cost without a warning
NARROW = 0.0001  # nats a row that it may cost at a mode for classes: chosen on tables of scikit-learn and UCI
WIDE = 0.003  # nats a row that it may cost there where only parts of the curvature are known, or the noise is normal
ERRORS = 2.0  # standard errors that it must exceed as well, or
LARGE, FEWER = 0.01, 1.0  # nats and standard errors: a few outliers can hide what the other rows lose
ROWS, FEWEST_ROWS = 500, 40
DRAWS, FEWEST_DRAWS = 400, 100
SHARE = 0.1  # of the forward passes of rows in a fit: the most that the measure may add
NUMBERS = 2**24  # outputs of all draws that are held at once
MEMBERS = 16  # that are measured
MOST_OUTPUTS = 256  # of a row that is left out: cavities take the cube of their number
MANY, EXCESS = 0.3, 0.1  # weights a row from which a point may be too sure, and nats a row that it may be so unsaid
TINY = torch.finfo(torch.float64).tiny
REMEDY = (
    "Predict by the mean, take Laplace from MAP, give other prior scales, or a lower temperature: Tempering.cold(0.1)."
)
ON_NEW_ROWS = "The fit chose its scales: compare both on rows that it has not seen."
_CHOSEN = "the prior scales that the fit chose, left-out rows are predicted"
_REPLACED = (
    "The posterior has a prior scale chosen by leave-one-out instead, of which the weights are no mode: its log "
    "evidence says little."
)


class WidthCost(NamedTuple):
    """Nats a row by which a posterior predicts worse than its mean, or another point, with a standard error."""

    nats: float
    error: float
    point: str = "its mean does"

    @property
    def harms(self) -> bool:
        """Whether the cost is above `HARM` and surely so, or above `LARGE` and probably so."""
        return self.nats > min(max(HARM, ERRORS * self.error), max(LARGE, FEWER * self.error))


def width_cost(posterior: Posterior, rows: Batch, draws: int, start: Tensor | None = None) -> WidthCost:
    """Compare log predictive densities of rows of the fit under the posterior and at its mean.

    With `start`, weights that the fit began at, the larger of this cost and the cost against these.

    **Math**: the mean over rows of log p(y | f(m)) - log E_q p(y | f(w)). Left-out rows would be predicted worse by
    both, and to second order by equally much: with gradient g and Hessian H of log p at outputs of covariance S, each
    loses g S g by leaving the row out, and the difference stays -(g S g + tr H S) / 2. Where outputs are linear in the
    weights, and cavities are defined, rows are left out (`left_out_rows`): there it is exact for normal noise, and
    small data need it. In networks the variational covariance does not tell how the mean would move.

    Expectations are over `draws`, with the first term of their bias removed, or in closed form for `Linearized`. The
    standard error is of rows and of draws.

    **Limit**: a mean that has learnt its rows by heart looks better than it is: held-out rows say more.
    """
    joint = posterior.joint.as_joint("width_cost")
    likelihood, gaussian = joint.likelihood, posterior.as_gaussian()
    rows = with_targets(likelihood, rows)
    targets = rows.targets.double() if rows.targets.is_floating_point() else rows.targets
    with torch.no_grad():
        centre = joint.outputs(posterior.point(), rows.inputs, posterior.buffers or None).double()
        at_mean = likelihood.log_prob(centre, targets)  # (N,)
        noise = 0.0
        if isinstance(posterior, Linearized):
            own = posterior.predict(rows.inputs).log_prob(rows.targets).double()
        else:
            outputs = posterior.outputs(rows.inputs, draws, Key(0).fold("width cost")).double()
            logs = likelihood.log_prob(outputs, targets)  # (S, N)
            own = logs.logsumexp(0) - math.log(draws)
            relative = (logs - own).exp()  # of mean 1 over draws
            own = own + relative.var(0) / (2.0 * draws)
            noise = float(relative.mean(1).var()) / draws
        began = (
            None if start is None else likelihood.log_prob(joint.outputs(start, rows.inputs).double(), targets) - own
        )
        each = at_mean - own
        few = centre[:1].numel() <= MOST_OUTPUTS
        if gaussian is not None and few and is_linear(joint, posterior.point(), rows, posterior.buffers or None):
            left = left_out_rows(Linearized(gaussian.joint, gaussian), rows)
            each = torch.where(left.posterior.isnan(), each, left.plug_in - left.posterior)
    weights = row_weights(likelihood, rows, each.dtype)
    weights = torch.ones_like(each) if weights is None else weights
    share = weights / weights.sum()

    def averaged(each: Tensor, point: str) -> WidthCost:
        mean = (share * each).sum()
        spread = float((share * (each - mean)).square().sum()) * len(each) / (len(each) - 1)
        return WidthCost(float(mean), math.sqrt(spread + noise), point)

    costs = [averaged(each, "its mean does")]
    if began is not None:
        costs.append(averaged(began, "the weights that it started from do"))
    return max(costs, key=lambda cost: (cost.harms, cost.nats))


def measured_width_cost(
    name: str,
    joint: Problem,
    posterior: Callable[[], Posterior],
    data: Data,
    seen: int,
    remedy: str = REMEDY,
    start: Tensor | None = None,
) -> dict[str, Tensor]:
    """Return "width_cost" for a trace, in nats a row, with a warning where the posterior does harm.

    `name` names the method, and `seen` is the number of rows that passed the network in its fit: nothing is measured
    where that would take more than a tenth of these passes. With `start`, weights (P,) or (M, P) that the fit began at,
    the cost is the larger of both.
    """
    if not isinstance(joint, Joint) or isinstance(data, NoData) or data.augmentation is not None:
        return {}
    allowed = int(SHARE * seen)
    count = min(ROWS, data.num_data, allowed // FEWEST_DRAWS)
    if count < min(FEWEST_ROWS, data.num_data):
        return {}
    draws = min(DRAWS, allowed // count)
    try:
        rows = data.sample(count, for_all=False)
        numbers = joint.example_output(rows.member(0)).numel()
        if rows.size < 2 or draws * rows.size * numbers > NUMBERS:
            return {}
        whole = posterior()
        if whole.num_members is None:
            costs = [width_cost(whole, rows, draws, start)]
        else:
            starts = [None] * whole.num_members if start is None else list(start)
            members = range(min(MEMBERS, whole.num_members))
            costs = [width_cost(whole.member(i), rows.member(i), draws, starts[i]) for i in members]
    except (PosterityError, ValueError, TypeError, RuntimeError, NotImplementedError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        logger.info("what the width of the posterior costs is not known: %s", reason.rstrip("."))
        return {}
    worst = max((cost for cost in costs if cost.harms), key=lambda cost: cost.nats, default=None)
    if worst is not None:
        logger.warning(
            f"{name}: the posterior predicts rows of the fit worse than {worst.point}, by {worst.nats:.2g} nats a "
            f"row (standard error {worst.error:.1g}). {remedy}"
        )
    nats = torch.tensor([cost.nats for cost in costs], dtype=torch.float64)
    return {"width_cost": nats if len(costs) > 1 else nats[0]}


def plug_in_excess(joint: Problem, theta: Tensor, buffers: Buffers, data: Data) -> dict[str, Tensor]:
    """Return "plug_in_excess" for a trace: nats a row that a point of a linear model is too sure by; warn if many.

    Noise that the evidence chose is the noise around the posterior. A point has the error of its weights on top: with
    gamma effective weights new rows have mean squares s^2 N / (N - gamma), and N - gamma = RSS / s^2 at the maximum of
    the evidence. So r = N s^2 / RSS is what the plug-in's variance is too small by, and costs (r - 1 - log r) / 2 nats.
    """
    likelihood = joint.likelihood if isinstance(joint, Joint) else None
    if not isinstance(likelihood, GaussianNoise) or not likelihood.chosen or likelihood.num_free:
        return {}
    noise = torch.as_tensor(likelihood.scale, dtype=torch.float64)
    few = joint.num_weights < MANY * data.num_data
    if not isinstance(joint, Joint) or few or theta.dim() > 1 or noise.numel() > 1:
        return {}
    rows = data.sample(ROWS)
    if not is_linear(joint, theta, rows, buffers or None):
        return {}
    with torch.no_grad():
        squares, count = residual_sums(likelihood, joint.outputs(theta, rows.inputs, buffers or None), rows)
    ratio = float(noise) ** 2 * float(count) / max(float(squares), TINY)
    excess = 0.5 * (ratio - 1.0 - math.log(ratio)) if ratio > 1.0 else 0.0
    if excess > EXCESS:
        logger.warning(
            f"MAP alone is too sure: with {joint.num_weights:,} weights to {data.num_data:,} rows its errors on new "
            f"rows are some {math.sqrt(ratio):.2g} times the noise of {float(noise):.3g} that the evidence "
            f"chose, which costs {excess:.2g} nats a row. Laplace started from it adds the error of the weights."
        )
    return {"plug_in_excess": torch.tensor(excess, dtype=torch.float64)}


def that_predicts(posterior: Linearized, rows: Batch) -> Linearized:
    """Return the posterior with the scales chosen that were left out; warn where its mean alone predicts better.

    Scales that a fit chose are replaced where their width surely costs much. With more than 256 outputs a row, rows are
    not left out: scales that were left out come by the evidence.
    """
    joint = posterior.joint.as_joint("Laplace")
    prior, rows = joint.bound_prior, with_targets(joint.likelihood, rows)
    normal = isinstance(prior, Normal)
    outputs = joint.example_output(rows).numel()
    if outputs > MOST_OUTPUTS:
        if not leaves_out(joint):
            return posterior
        logger.warning(
            f"Laplace: with {outputs:,} outputs a row, the scales that were left out are chosen by the evidence: "
            "leave-one-out takes the cube of that number. Give a prior scale to choose it yourself."
        )
        return retuned(posterior, Evidence())
    if normal and prior.chosen == LEFT_OUT:
        return PredictiveFit().by_cavities(posterior, rows, at_mode=False)
    if leaves_out(joint) and not normal:
        logger.warning("The scales that were left out stay at 1: they are chosen for normal priors only.")
    elif leaves_out(joint):
        posterior = with_noise(posterior)
    whole = isinstance(posterior.gaussian.precision, Dense)
    if normal and prior.chosen and whole and not joint.likelihood.normal_targets:
        narrowed = PredictiveFit(tolerance=NARROW).narrowed(posterior, rows)
        if narrowed is not posterior:
            logger.warning(f"Under {_CHOSEN} worse than by a narrower Gaussian. {_REPLACED}")
        return narrowed
    left = left_out_rows(posterior, rows)
    if normal and prior.chosen and left.surely_cost_more_than(WIDE):
        logger.warning(f"Under {_CHOSEN} worse than by the weights alone, by {left.cost:.2g} nats a row. {_REPLACED}")
        return PredictiveFit(tolerance=WIDE).by_cavities(posterior, rows, at_mode=True)
    cost = width_cost(posterior, rows, 0)
    if cost.harms:
        noise = joint.likelihood
        given = not prior.chosen or (isinstance(noise, GaussianNoise) and not noise.chosen)
        remedy = "Leave the scales of prior and noise out, or give smaller ones." if given else ON_NEW_ROWS
        logger.warning(
            f"The posterior predicts rows of the fit worse than the weights alone, by {cost.nats:.2g} nats a row "
            f"(standard error {cost.error:.1g}). {remedy}"
        )
    return posterior
