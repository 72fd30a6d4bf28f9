"""Scales of prior and noise that were left out, by a short evidence fit or by M-steps."""

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from posterity.curvature import Full, Kronecker
from posterity.errors import BadData, PosterityError
from posterity.evidence import NoiseScale, PerLayer, PriorScale, Shared, left_out_rows
from posterity.evidence.marginal import GIVEN, LeftOut, grouped, left_out, rescaled_prior
from posterity.inference.infer import infer
from posterity.inference.method import Method
from posterity.methods.laplace import WHOLE, Laplace
from posterity.methods.maximum_a_posteriori import MAP
from posterity.methods.online_laplace import OnlineLaplace
from posterity.methods.variational_em import VariationalEM
from posterity.model.data import Batch, Data, TensorData
from posterity.model.joint import Joint
from posterity.model.scales import as_chosen, leaves_out, with_scales_of
from posterity.numerics.random import Key
from posterity.optim import LBFGS, Adam, Cosine
from posterity.posteriors import Linearized, Posterior
from posterity.priors import Normal

logger = logging.getLogger("posterity")

ROWS = 4096  # of the short fit; each then stands for several
STEPS = 1500
MOST_WEIGHTS = 1_000_000
MOST_POWERS = 6  # of two, by which prior scales may move from the evidence's
WORTH = 0.001  # nats a row that make the next power worth it
MOST_OUTPUTS = 100  # the curvature of the output layer goes as their cube


def by_evidence(joint: Joint, data: Data, start: Joint | None, key: Key) -> Joint:
    """The problem with the scales that were left out: those of the start, else by a short fit of `OnlineLaplace`.

    The fit is on at most 4,096 rows. Where it is not possible the scales stay at 1, and the log says why.
    """
    joint = joint if start is None else with_scales_of(joint, start)
    if not leaves_out(joint):
        return joint
    problem = joint if joint.num_members is None else joint.member(0)
    try:
        rows = data.sample(ROWS).member(0)
    except BadData:  # a loader that does not visit every row
        rows = data.first().member(0)
    outputs, reason = problem.example_output(rows).numel(), ""
    if joint.num_weights > MOST_WEIGHTS or outputs > MOST_OUTPUTS:
        reason = f"{joint.num_weights:,} weights and {outputs} outputs are too many for the fit that would choose them"
    elif not isinstance(problem.bound_prior, Normal):
        reason = "only the scales of normal priors are chosen"
    else:
        fit = MAP(STEPS, 128, Adam(0.01), Cosine())
        method = OnlineLaplace(fit, Laplace(structure=Kronecker(), tuning=None), rounds=15)
        problem = replace(problem, num_data=rows.size)
        try:
            with _quiet():
                posterior, _ = infer(method, problem, tuple(rows[:3]), seed=key.seed, progress=False)
                fitted = _refined(problem, posterior, rows)
            return with_scales_of(joint, fitted)
        except (PosterityError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
            reason = f"the fit that would choose them failed ({error})"
    logger.warning("The scales that were left out stay at their start: %s. Give them, as in Normal(scale=0.5).", reason)
    return as_chosen(joint, "start")


def by_m_steps(method: Method, joint: Joint, data: Data, start: Joint | None, key: Key) -> Joint:
    """The problem with the scales that were left out, by M-steps between steps of the method.

    The steps begin at the scales of the short evidence fit, and are on at most 4,096 rows.
    """
    problem = by_evidence(joint, data, start, key)
    prior, noise = left_out(joint)
    if joint.num_members is not None or problem.likelihood.num_free or not isinstance(problem.bound_prior, Normal):
        return problem
    rows = data.sample(ROWS).member(0)
    m_steps = (*[PriorScale(LeftOut.of(joint, PerLayer()))] * prior, *[NoiseScale()] * noise)
    problem = replace(problem, num_data=rows.size)
    with _quiet():
        posterior, _ = infer(VariationalEM(method, m_steps), problem, tuple(rows[:3]), seed=key.seed, progress=False)
    return with_scales_of(joint, as_chosen(posterior.joint.as_joint("by_m_steps"), "M-steps"))


def _refined(problem: Joint, posterior: Posterior, rows: Batch) -> Joint:
    """The problem with its chosen prior scales times the power of two whose mode predicts best, each row left out.

    The evidence is taken at a fixed curvature, which is right for normal noise only: the curvature of classes falls as
    weights grow. Where all rows fit a step, and the whole curvature memory, the mode is found anew for each scale.
    """
    joint = posterior.joint.as_joint("by_evidence")
    small = joint.num_weights <= WHOLE and isinstance(MAP().settled(joint, TensorData(rows)).optimizer, LBFGS)
    if joint.likelihood.normal_targets or not small:
        return joint
    losses: dict[int, float] = {}
    groups = LeftOut.of(problem, Shared())
    names = grouped(joint, groups)[0]
    moves = torch.tensor([name != GIVEN for name in names], dtype=torch.float64, device=joint.device)
    curvature = Laplace(structure=Full(), tuning=None)

    def loss(power: int) -> float:
        if power not in losses:
            trial = replace(joint, prior=rescaled_prior(joint, groups, 2.0 ** (power * moves)))
            mode, _ = infer(MAP(), trial, tuple(rows[:3]), start=posterior.point(), progress=False)
            fitted, _ = infer(curvature, trial, tuple(rows[:3]), start=mode, progress=False)
            assert isinstance(fitted, Linearized)
            left = left_out_rows(fitted, rows)
            losses[power] = -float(left.plug_in.nanmean()) if math.isfinite(left.cost) else math.inf
        return losses[power]

    best = 0
    for way in (1, -1):
        while abs(best + way) <= MOST_POWERS and loss(best + way) < loss(best) - WORTH:
            best += way
        if best:
            break
    return replace(joint, prior=rescaled_prior(joint, groups, 2.0 ** (best * moves)))


@contextmanager
def _quiet() -> Iterator[None]:
    """A context in which what the short fit would say is not logged."""
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
