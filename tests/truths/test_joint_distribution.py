"""Geweke's test: parameters and data drawn in turn, by a sampler and the likelihood, stay distributed as they began."""

import math
from importlib import import_module

import pytest
import torch

from posterity.methods import HMC, MALA, MAMS, NUTS, ChEES, Langevin, Metropolis
from posterity.model import Density
from posterity.model.density import Positive
from posterity.numerics.random import Key
from posterity_studies.calibration.calibrate import MODELS

pytestmark = pytest.mark.cpu
CHAINS, ROUNDS = 2000, 25
EXACT = {
    "nuts": NUTS(warmup=0, chains=CHAINS, step_size=0.3, max_depth=3),
    "hmc": HMC(warmup=0, chains=CHAINS, step_size=0.3, steps=4),
    "chees": ChEES(warmup=0, chains=CHAINS, step_size=0.3, length=2.0),
    "mams": MAMS(warmup=0, chains=CHAINS, step_size=0.6, length=3.0),
    "mala": MALA(warmup=0, chains=CHAINS, step_size=0.05),
    "metropolis": Metropolis(warmup=0, chains=CHAINS, step_size=0.3),
}


def successive(method, problem, seed):
    """theta (C, P) and data after so many rounds of a transition and new data, from a draw of both."""
    key = Key(seed)
    theta, data = problem.simulated(CHAINS, key)
    for index in range(ROUNDS):
        now = key.fold(index)
        state, _ = method.step(problem.joint, method.init(problem.joint, theta, now), data, now)
        theta = method.keep(state).theta
        likelihood = problem.joint.fitted(theta).likelihood
        data = data._replace(targets=likelihood.sample(problem.joint.outputs(theta, problem.inputs), now.fold("data")))
    return theta, data


def scores(values, others):
    """The largest distance of first and second moments of samples (C,), in standard errors."""
    found = []
    for one, other in ((values, others), (values.square(), others.square())):
        found.append(float((one.mean() - other.mean()).abs() / ((one.var() + other.var()) / CHAINS).sqrt()))
    return max(found)


def largest(method, problem):
    pairs = successive(method, problem, 5), problem.simulated(CHAINS, Key(6))
    one, other = (problem.quantities(theta.unsqueeze(1), data) for theta, data in pairs)
    return max(scores(one[name][:, 0], other[name][:, 0]) for name in one)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", EXACT)
def test_exact_samplers_leave_the_joint_distribution_as_it_is(name, model):
    assert largest(EXACT[name], MODELS[model]()) < 5


@pytest.mark.parametrize("model", MODELS)
def test_a_sampler_without_its_accept_step_does_not(model, monkeypatch):
    always = lambda proposal, place, log_ratio, log_uniform: (proposal, log_ratio.clamp(max=0.0).exp())  # noqa: E731
    monkeypatch.setattr(import_module("posterity.kernels.metropolis"), "accepted", always)
    assert largest(EXACT["metropolis"], MODELS[model]()) > 5


def test_langevin_with_large_steps_does_not():
    assert largest(Langevin(warmup=0, chains=CHAINS, step_size=0.4), MODELS["logistic"]()) > 5


def constrained_rounds():
    """Scales (C,) after rounds, and as they are drawn: exponential, each with two normal numbers of that scale."""
    key = Key(7)
    drawn = -torch.log1p(-key.fold("scale").uniform((2, CHAINS), torch.float64))
    held = {"data": drawn[0].unsqueeze(1) * key.fold("first").normal((CHAINS, 2), torch.float64)}

    def log_density(scale):
        return -scale - 0.5 * (held["data"] / scale.unsqueeze(1)).square().sum(1) - 2 * scale.log()

    density = Density(log_density, {"scale": ()}, {"scale": Positive()}, batched=True, dtype=torch.float64)
    method = HMC(warmup=0, chains=CHAINS, step_size=0.4, steps=4)
    theta = density.unconstrained({"scale": drawn[0]})
    for index in range(ROUNDS):
        now = key.fold(index)
        state, _ = method.step(density, method.init(density, theta, now), None, now)
        theta = method.keep(state).theta
        scale = density.constrained(theta)["scale"]
        held["data"] = scale.unsqueeze(1) * now.fold("data").normal((CHAINS, 2), torch.float64)
    return scale, drawn[1]


def test_constrained_densities_leave_the_joint_distribution_as_it_is():
    after, drawn = constrained_rounds()
    assert scores(after, drawn) < 5
    assert scores(after.log(), drawn.log()) < 5
    assert abs(float(after.mean()) - 1) < 5 / math.sqrt(CHAINS)


def test_without_the_jacobian_of_the_constraint_they_do_not(monkeypatch):
    right = Positive.forward
    monkeypatch.setattr(Positive, "forward", lambda self, u: (right(self, u)[0], torch.zeros_like(u)))
    after, drawn = constrained_rounds()
    assert scores(after, drawn) > 5
