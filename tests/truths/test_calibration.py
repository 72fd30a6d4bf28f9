"""Samplers are calibrated over data that the model itself makes; planted bugs are not."""

from functools import partial
from importlib import import_module

import pytest
import torch
from torch import nn

from posterity.likelihoods import Gaussian
from posterity.methods import HMC, MALA, MAMS, NUTS, SGLD, ChEES, Langevin, Metropolis
from posterity.methods.parts.sampler import Sampler, Tuning
from posterity.model.joint import Joint
from posterity.numerics.random import Key
from posterity.priors import Normal
from posterity_studies.calibration.calibrate import MODELS, Problem, calibrate

pytestmark = pytest.mark.cpu
EXACT = {
    "nuts": NUTS(warmup=80, thin=3, max_depth=4),
    "hmc": HMC(warmup=100, steps=6, thin=4),
    "chees": ChEES(warmup=60, thin=3, max_steps=12),
    "mams": MAMS(warmup=60, thin=2, max_steps=6),
    "mala": MALA(warmup=150, thin=20),
    "metropolis": Metropolis(warmup=150, thin=25),
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", EXACT)
def test_exact_samplers_are_calibrated(name, model):
    found = calibrate(EXACT[name], MODELS[model](), replicates=100, draws=31, seed=3)
    assert found.smallest > 1e-4, str(found)


@pytest.mark.parametrize("kind", [Langevin, partial(SGLD, batch_size=5)])
def test_small_actual_step_size_langevin_dynamics_are_nearly_calibrated_and_large_ones_are_not(kind):
    small, large = (kind(warmup=150, thin=25, step_size=size) for size in (0.03, 0.4))
    assert calibrate(small, MODELS["logistic"](), replicates=200, seed=2).smallest > 1e-4
    assert calibrate(large, MODELS["logistic"](), replicates=200, seed=2).smallest < 1e-4


def no_accept_step(patch):
    always = lambda proposal, place, log_ratio, log_uniform: (proposal, log_ratio.clamp(max=0.0).exp())  # noqa: E731
    patch.setattr(import_module("posterity.kernels.langevin"), "accepted", always)
    return MALA(warmup=150, thin=20), MODELS["logistic"](), 300


def wrong_jacobian(patch):
    """The prior of log(scale) as if it were one of the scale, without the Jacobian of the logarithm."""
    right = Gaussian.free_log_prior
    patch.setattr(Gaussian, "free_log_prior", lambda self, raw: right(self, raw) - raw.sum(-1))
    likelihood = Gaussian(scale=1.0, learn=True, log_scale_prior=(0.0, 1.0))
    joint = Joint(nn.Linear(1, 1, bias=False).double(), likelihood, Normal(1.0), num_data=2)
    inputs = torch.tensor([[-1.0], [1.0]], dtype=torch.float64)
    return HMC(warmup=100, thin=4, steps=6), Problem(joint, inputs), 300


def adaptation_never_stopped(patch):
    """Where the warm-up ends, the search for the step size begins anew and goes on for ever."""
    right = Sampler.step

    def step(self, joint, state, batch, key):
        after, info = right(self, joint, state, batch, key)
        if not after.adaptation:
            after = after._replace(adaptation=self._schedule().begun(Tuning(**after.tuning)))
        return after, info

    patch.setattr(Sampler, "step", step)
    patch.setattr(MALA, "calm", False)  # a calm search moves too little for its harm to be seen
    joint = Joint(nn.Linear(1, 1, bias=False).double(), Gaussian(scale=1.0), Normal(1.0), num_data=1)
    return MALA(warmup=100, thin=10), Problem(joint, torch.ones(1, 1, dtype=torch.float64)), 5000


def half_gradient(patch):
    half = lambda place, step_size: place.position + 0.5 * step_size * place.grad  # noqa: E731
    patch.setattr(import_module("posterity.kernels.langevin"), "proposal_mean", half)
    return Langevin(warmup=150, thin=25, step_size=0.03), MODELS["logistic"](), 300


def prior_dropped(patch):
    right = Joint._prior_value_and_grad
    patch.setattr(Joint, "_prior_value_and_grad", lambda *args: tuple(0.0 * part for part in right(*args)))
    return HMC(warmup=100, thin=4, steps=6), MODELS["network"](), 100


def stale_momentum(patch):
    right = Sampler._noise
    patch.setattr(Sampler, "_noise", lambda *args: (right(*args[:-1], Key(0))[0], right(*args)[1]))
    return HMC(warmup=100, thin=4, steps=6), MODELS["logistic"](), 100


@pytest.mark.parametrize(
    "bug", [no_accept_step, wrong_jacobian, adaptation_never_stopped, half_gradient, prior_dropped, stale_momentum]
)
def test_planted_bugs_are_caught(bug):
    with pytest.MonkeyPatch.context() as patch:
        method, problem, replicates = bug(patch)
        wrong = calibrate(method, problem, replicates, seed=1)
    right = calibrate(method, problem, replicates, seed=1)
    assert wrong.smallest < 1e-4, str(wrong)
    assert right.smallest > 1e-4, str(right)
