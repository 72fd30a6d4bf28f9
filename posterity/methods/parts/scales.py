"""Scales of prior and noise that were left out, by a short evidence fit."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from posterity.curvature import Kronecker
from posterity.errors import BadData, PosterityError
from posterity.inference.infer import infer
from posterity.methods.laplace import Laplace
from posterity.methods.maximum_a_posteriori import MAP
from posterity.methods.online_laplace import OnlineLaplace
from posterity.model.data import Data
from posterity.model.joint import Joint
from posterity.model.scales import as_chosen, leaves_out, with_scales_of
from posterity.numerics.random import Key
from posterity.optim import Adam, Cosine
from posterity.priors import Normal

logger = logging.getLogger("posterity")

ROWS = 4096  # of the short fit; each then stands for several
STEPS = 1500
MOST_WEIGHTS = 1_000_000
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
            return with_scales_of(joint, posterior.joint.as_joint("by_evidence"))
        except (PosterityError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
            reason = f"the fit that would choose them failed ({error})"
    logger.warning("The scales that were left out stay at their start: %s. Give them, as in Normal(scale=0.5).", reason)
    return as_chosen(joint, "start")


@contextmanager
def _quiet() -> Iterator[None]:
    """A context in which what the short fit would say is not logged."""
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
