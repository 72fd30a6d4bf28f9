"""Scales of prior and noise that were left out, by a short evidence fit or by M-steps."""

import glob
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from posterity.curvature import Full, Kronecker
from posterity.errors import PosterityError
from posterity.evidence import NoiseScale, PerLayer, PriorScale, Shared, Tuned, residual_sums, tuned_joint
from posterity.evidence.marginal import GIVEN, LeftOut, grouped, left_out, rescaled_prior
from posterity.evidence.ridge import SMALLEST_NOISE, best_ridge
from posterity.inference.infer import infer
from posterity.inference.method import Method
from posterity.likelihoods import Gaussian
from posterity.methods.conjugate import Conjugate
from posterity.methods.laplace import WHOLE, Laplace
from posterity.methods.maximum_a_posteriori import MAP
from posterity.methods.online_laplace import OnlineLaplace
from posterity.methods.variational_em import VariationalEM
from posterity.model.batch import map_inputs
from posterity.model.data import Batch, Data, TensorData
from posterity.model.joint import Joint
from posterity.model.scales import as_chosen, leaves_out, with_scales_of
from posterity.model.tempering import Tempering
from posterity.numerics.random import Key
from posterity.optim import LBFGS, Adam, Cosine
from posterity.options import LEFT_OUT
from posterity.posteriors import Linearized, Posterior
from posterity.priors import Layerwise, Normal, Prior

logger = logging.getLogger("posterity")

ROWS = 4096  # of the short fit; each then stands for several
STEPS, ROUNDS = 1500, 15
MOST_WEIGHTS = 1_000_000
MOST_POWERS = 6  # of two, by which prior scales may move from the evidence's
WORTH = 0.1  # nats of evidence that make the next power worth it
FEW_ROWS, SAME = 64, 0.01  # rows, and relative change of their outputs, by which a layer is known to be normed
FAILURES = (PosterityError, NotImplementedError, RuntimeError, TypeError, ValueError)  # of a fit
CHUNK = 512  # rows of a linear model at a time
MOST_OUTPUTS = 100  # the curvature of the output layer goes as their cube


def by_evidence(joint: Joint, data: Data, start: Joint | None, key: Key) -> Joint:
    """The problem with the scales that were left out: those of the start, else by a short fit of `OnlineLaplace`.

    The fit is on at most 4,096 rows, and untempered: the scales are the same at every temperature. Layers whose length
    a norm takes out have no scale that fits, and keep 1. Where no fit is possible all stay at 1, and the log says why.
    """
    joint = joint if start is None else with_scales_of(joint, start)
    if not leaves_out(joint):
        return joint
    problem = joint if joint.num_members is None else joint.member(0)
    rows = data.sample(ROWS).member(0)
    outputs, reason = problem.example_output(rows).numel(), ""
    if joint.num_weights > MOST_WEIGHTS or outputs > MOST_OUTPUTS:
        reason = f"{joint.num_weights:,} weights and {outputs} outputs are too many for the fit that would choose them"
    elif not isinstance(problem.bound_prior, Normal):
        reason = "only the scales of normal priors are chosen"
    else:
        problem = replace(problem, num_data=rows.size, tempering=Tempering.bayes())
        try:
            with without_warnings():
                fitted = _linear(problem, rows)
                if fitted is None:
                    problem = replace(problem, prior=_without_normed(problem, rows))
                    posterior, _ = infer(
                        evidence_fit(STEPS, ROUNDS), problem, tuple(rows[:3]), seed=key.seed, progress=False
                    )
                    fitted = _refined(problem, posterior, rows)
            return with_scales_of(joint, fitted)
        except FAILURES as error:
            reason = f"the fit that would choose them failed ({error})"
    logger.warning("The scales that were left out stay at their start: %s. Give them, as in Normal(scale=0.5).", reason)
    return as_chosen(joint, "start")


def evidence_fit(steps: int, rounds: int) -> OnlineLaplace:
    """The short fit by which scales are chosen: one for each layer, and the noise."""
    return OnlineLaplace(
        MAP(steps, 128, Adam(0.01), Cosine()), Laplace(structure=Kronecker(), tuning=None), rounds=rounds
    )


def by_m_steps(method: Method, joint: Joint, data: Data, start: Joint | None, key: Key) -> Joint:
    """The problem with the scales that were left out, by M-steps between steps of the method.

    The steps begin at the scales of the short evidence fit, and are on at most 4,096 rows. Where they fail these scales
    stay, and the log says so.
    """
    chosen = problem = by_evidence(joint, data, start, key)
    prior, noise = left_out(joint)
    if joint.num_members is not None or problem.likelihood.num_free or not isinstance(problem.bound_prior, Normal):
        return problem
    rows = data.sample(ROWS).member(0)
    m_steps = (*[PriorScale(LeftOut.of(joint, PerLayer()))] * prior, *[NoiseScale()] * noise)
    problem = replace(problem, num_data=rows.size)
    try:
        with without_warnings():
            em = VariationalEM(method, m_steps)
            posterior, _ = infer(em, problem, tuple(rows[:3]), seed=key.seed, progress=False)
    except FAILURES as error:
        logger.warning("The evidence chose the scales, since M-steps failed (%s). Give them to be sure.", error)
        return chosen
    return with_scales_of(joint, as_chosen(posterior.joint.as_joint("by_m_steps"), "M-steps"))


def _linear(problem: Joint, rows: Batch) -> Joint | None:
    """The problem at the maximum of its exact evidence, for a network that is linear in its weights; None else.

    It is for normal noise, with both scales left out. Alternating fits come near the maximum only slowly where there
    are more weights than rows: noise and weights can then explain much the same.
    """
    prior, likelihood = problem.prior, problem.likelihood
    if not isinstance(prior, Normal) or not isinstance(likelihood, Gaussian) or problem.random_indices is not None:
        return None
    if problem.num_weights > WHOLE or {prior.chosen, likelihood.chosen} != {LEFT_OUT} or likelihood.num_free:
        return None
    if isinstance(prior.mean, Tensor) or prior.mean != 0.0:
        return None
    method, unit = Conjugate(), replace(problem, likelihood=Gaussian(scale=1.0), prior=Normal(scale=1.0))
    try:
        state = method.init(unit, problem.network.initial, Key(0))
        for low in range(0, rows.size, CHUNK):
            part = rows.map(lambda tensor, low=low: tensor[low : low + CHUNK])  # type: ignore[misc]
            state, _ = method.step(unit, state, part, Key(0))
    except FAILURES:  # it is not linear, or its derivatives are not known
        return None
    root = state.root.cpu()
    design, targets = root[:, :-1], root[:, -1]
    squares, directions = torch.linalg.eigh(design.T @ design)
    some = squares > 1e-12 * len(squares) * squares[-1]
    squares, products = squares[some], (directions.T @ (design.T @ targets))[some]
    total, count = float(targets.square().sum()), round(float(residual_sums(likelihood, rows.targets, rows)[1]))
    rest = max(0.0, total - float((products.square() / squares).sum()))
    floor = max(SMALLEST_NOISE**2 * total / max(1, count), torch.finfo(torch.float64).tiny)
    ridge, variance = best_ridge(squares, products, rest, count, floor, WORTH)
    groups, scale = Shared(), variance**0.5
    precision = torch.tensor([ridge / variance], dtype=torch.float64, device=problem.device)
    return tuned_joint(problem, Tuned(groups, grouped(problem, groups)[0], precision, scale, math.nan, math.nan, 0))


def _without_normed(problem: Joint, rows: Batch) -> Prior:
    """The prior, in which tensors count as chosen where a norm takes out the length of their layer.

    The outputs are the same at every length of such a layer, so that the evidence would shrink its scale for ever.
    """
    network, layout, layers = problem.network, problem.network.layout, PerLayer()
    inputs = map_inputs(lambda tensor: tensor[:FEW_ROWS], rows.inputs)
    theta = network.initial + 0.1 * Key(0).normal((layout.size,), network.initial.dtype, network.initial.device)
    index, names = layers.index(layout).to(theta.device), layers.names(layout)
    normed = set()
    with torch.no_grad():
        for number, name in enumerate(names):
            longer, longest = (
                network.run(network.views(torch.where(index == number, factor * theta, theta)), inputs, train=True)[0]
                for factor in (2.0, 4.0)
            )
            if float((longest - longer).norm()) <= SAME * float(longer.norm()):
                normed.add(name)
    if not normed:
        return problem.prior
    each = zip(layout, problem.prior.by_tensor(layout), strict=True)
    return Layerwise({glob.escape(p.name): q.as_chosen("start") if layers.name(p) in normed else q for p, q in each})


def _refined(problem: Joint, posterior: Posterior, rows: Batch) -> Joint:
    """The problem with its chosen prior scales times the power of two of the largest evidence.

    The fit takes the evidence at a fixed curvature, which is right for normal noise only: the curvature of classes
    falls as weights grow. Where all rows fit a step, and the whole curvature memory, mode and curvature are found anew
    for each power.
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
            assert fitted.log_evidence is not None
            losses[power] = -float(fitted.log_evidence)
        return losses[power]

    best = 0
    for way in (1, -1):
        while abs(best + way) <= MOST_POWERS and loss(best + way) < loss(best) - WORTH:
            best += way
        if best:
            break
    return replace(joint, prior=rescaled_prior(joint, groups, 2.0 ** (best * moves)))


@contextmanager
def without_warnings() -> Iterator[None]:
    """A context in which the library logs no warnings: of fits that are only steps to another."""
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
