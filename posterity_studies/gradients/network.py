"""A small network: the variance of its whole gradient for every estimator, before and after training."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from posterity.datasets import two_moons
from posterity.inference import infer
from posterity.likelihoods import Categorical
from posterity.methods import MeanField
from posterity.methods.parts.gradients import (
    Estimator,
    Factorised,
    Flipout,
    LocalReparameterisation,
    ScoreFunction,
    StickTheLanding,
    WeightSampling,
)
from posterity.methods.parts.gradients.estimator import Gradients, divergence
from posterity.model import Batch, Joint
from posterity.networks import MLP
from posterity.numerics.random import Key
from posterity.optim.optimizer import Adam
from posterity.optim.schedules import Cosine
from posterity.posteriors import Gaussian
from posterity.priors import Normal
from posterity_studies.gradients.example import Variance, total_variance

ROWS, HIDDEN = 100, 10
REPEATS = 300
STEPS = 2000
SCORE_DRAWS = 8
BATCH = 10


class Plan(NamedTuple):
    """An estimator, its draws, and the rows of a batch, drawn anew for each estimate."""

    estimator: Estimator
    draws: int = 1
    rows: int = ROWS

    @property
    def passes(self) -> float:
        """The passes through the data of one estimate."""
        return self.draws * self.rows / ROWS


ESTIMATORS: Mapping[str, Plan] = MappingProxyType(
    {
        "score function": Plan(ScoreFunction(SCORE_DRAWS, baseline=False), SCORE_DRAWS),
        "score with baseline": Plan(ScoreFunction(SCORE_DRAWS), SCORE_DRAWS),
        "pathwise": Plan(WeightSampling()),
        f"pathwise, batches of {BATCH}": Plan(WeightSampling(), rows=BATCH),
        "pathwise, antithetic": Plan(WeightSampling(draws=2, antithetic=True), draws=2),
        "stick the landing": Plan(StickTheLanding()),
        "flipout": Plan(Flipout()),
        "local reparameterisation": Plan(LocalReparameterisation()),
    }
)


@dataclass(frozen=True)
class Row:
    """An estimator of the gradient of the ELBO: its variance summed over all means, and over all scales."""

    when: str
    estimator: str
    passes: float
    mean: Variance
    scale: Variance


@dataclass(frozen=True, eq=False)
class Problem:
    """The joint, its rows as one batch, and the Gaussians by name at which gradients are computed."""

    joint: Joint
    batch: Batch
    families: dict[str, Factorised]


def problem(seed: int) -> Problem:
    """Return two moons with a network of one hidden layer, and q at the start and after training."""
    data = two_moons(ROWS, seed=seed).train
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        net = MLP((2, HIDDEN, 2), activation="tanh")
    joint = Joint(net, Categorical(), Normal(), num_data=ROWS)
    method = MeanField(STEPS, None, Adam(0.02), Cosine(), LocalReparameterisation())
    q, _ = infer(method, joint, data.pair, seed=seed, progress=False)
    assert isinstance(q, Gaussian)
    state = method.init(joint, joint.network.initial, Key(seed))
    size = joint.size
    start = Factorised(state.parameters[:size], state.parameters[size:].exp(), None)
    trained = Factorised(q.mean, q.variance.sqrt().to(q.mean.dtype), None)
    return Problem(joint, Batch(*data.pair), {"at the start": start, "after training": trained})


def network(seed: int) -> list[Row]:
    """Compute all estimators at both Gaussians."""
    result = problem(seed)
    rows = []
    for when, q in result.families.items():
        for name, plan in ESTIMATORS.items():
            mean, scale = gradients(result, q, plan, Key(seed).fold(when).fold(name), REPEATS)
            variances = (total_variance(values, plan.passes) for values in (mean, scale))
            rows.append(Row(when, name, plan.passes, *variances))
    return rows


def gradients(result: Problem, q: Factorised, plan: Plan, key: Key, repeats: int) -> tuple[Tensor, Tensor]:
    """Return independent estimates of the ELBO's gradients in means and scales, (repeats, P) each."""
    pulls = Gradients(torch.zeros_like(q.mean), -1.0 / q.scale)  # in closed form, the same each time
    divergence(result.joint, q, q.scale.log(), key, pulls, 1.0)
    means, scales = [], []
    for repeat in range(repeats):
        batch = result.batch
        if plan.rows < ROWS:
            index = key.fold("rows").fold(repeat).permutation(ROWS)[: plan.rows]
            batch = batch.map(lambda tensor, index=index: tensor[index])  # type: ignore[misc]
        term = plan.estimator.data_term(result.joint, q, batch, {}, {}, key.fold(repeat))
        pull = term.divergence_grads or pulls
        means.append(term.grad_mean - pull.mean)
        scales.append(term.grad_scale - pull.scale)
    return torch.stack(means), torch.stack(scales)
