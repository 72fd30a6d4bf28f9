"""Marginal-likelihood training: where it ends, when it passes over the data, and that it resumes inside a pass."""

import dataclasses

import pytest
import torch
from contracts.cases import labels, network, numbers
from goldcases import load
from killedruns import KillAfter, KilledError
from torch import nn

import posterity as po
from posterity.curvature import CorrectedKronecker, Diagonal
from posterity.evidence import Evidence, MacKay, PerLayer, PerTensor, Shared
from posterity.inference import Checkpoint
from posterity.likelihoods import Categorical, Gaussian
from posterity.methods import MAP, Laplace, LargestVariance, LastLayer, OnlineLaplace
from posterity.model.batch import Feed
from posterity.optim import SGD
from posterity.priors import Normal

FLOAT64 = torch.float64


def gold_problem(case, likelihood, tempering=None):
    net = nn.Linear(2, 1, bias=False, dtype=FLOAT64)
    nn.init.zeros_(net.weight)
    prior = Normal(case.inputs["alpha0"] ** -0.5)
    joint = po.Joint(net, likelihood, prior, len(case.inputs["y"]), tempering or po.Tempering.bayes())
    return joint, (case.inputs["X"], case.inputs["y"])


def quick(tuning, rounds=10):
    """Gradient descent that comes near the mode between two passes."""
    fit = MAP(steps=100 * rounds, batch_size=None, optimizer=SGD(0.02, momentum=0.8))
    return OnlineLaplace(fit, Laplace(tuning=None, batch_size=3), tuning, rounds=rounds, burn_in=0.1)


@pytest.mark.parametrize("learn", [False, True])
@pytest.mark.parametrize("tuning", [Evidence(Shared()), MacKay(Shared())], ids=lambda tuning: type(tuning).__name__)
def test_a_linear_model_ends_at_the_gold_limit(tuning, learn):
    case = load("hyperparameter_em")
    joint, data = gold_problem(case, Gaussian(case.inputs["beta0"] ** -0.5, learn=learn))
    q, trace = po.infer(quick(tuning), joint, data, progress=False)
    case.check("limit.alpha", q.joint.prior.scale**-2)
    case.check("limit.beta", q.joint.likelihood.scale**-2)
    case.check("limit.log_evidence", q.log_evidence)
    assert q.joint.likelihood.num_free == 0
    assert trace["log_evidence"][-1] == pytest.approx(float(q.log_evidence), abs=1e-9)
    assert bool((trace["log_evidence"].diff() > -1e-6).all())  # rises from pass to pass
    assert trace["prior_precision"].shape == (len(trace["log_evidence"]), 1)
    assert float(trace["noise_scale"][-1]) == q.joint.likelihood.scale


def test_tempering_is_in_the_recorded_evidence_once():
    case = load("hyperparameter_em")
    joint, data = gold_problem(case, Gaussian(0.5), po.Tempering(0.6, 1.4))
    q, trace = po.infer(quick(Evidence(Shared()), rounds=3), joint, data, progress=False)
    assert trace["log_evidence"][-1] == pytest.approx(float(q.log_evidence), abs=1e-9)


def test_a_declared_prior_of_the_noise_counts():
    case = load("hyperparameter_em")
    free, data = gold_problem(case, Gaussian(0.5, learn=True))
    held, _ = gold_problem(case, Gaussian(0.5, learn=True, log_scale_prior=(0.0, 1e-3)))
    method = quick(Evidence(Shared()), rounds=5)
    assert po.infer(method, free, data, progress=False)[0].joint.likelihood.scale < 0.2
    scale = po.infer(method, held, data, progress=False)[0].joint.likelihood.scale
    assert scale == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("groups", [Shared(), PerLayer(), PerTensor()], ids=repr)
def test_the_posterior_is_that_of_laplace_at_the_tuned_joint(groups):
    x, y = numbers(FLOAT64)
    joint = po.Joint(network([3, 4, 1], FLOAT64), Gaussian(0.3, learn=True), Normal(0.7), 20)
    method = OnlineLaplace(
        MAP(steps=300, batch_size=10), Laplace(tuning=None, batch_size=6), Evidence(groups), rounds=4
    )
    q, trace = po.infer(method, joint, (x, y), progress=False)
    assert len(trace["log_evidence"]) == 5
    assert trace["prior_precision"].shape[1] == len(groups.names(joint.network.layout))
    alone, _ = po.infer(Laplace(tuning=None, batch_size=6), q.joint, (x, y), start=q.point(), progress=False)
    torch.testing.assert_close(q.gaussian.precision.covariance(), alone.gaussian.precision.covariance())
    torch.testing.assert_close(q.log_evidence, alone.log_evidence)
    assert q.joint.prior != joint.prior


@pytest.mark.parametrize(
    "laplace",
    [
        Laplace(structure=CorrectedKronecker(), tuning=None, batch_size=6),
        Laplace(subset=LastLayer(), tuning=None, batch_size=6),
        Laplace(subset=LargestVariance(8), tuning=None, batch_size=6),
    ],
    ids=["corrected kronecker", "last layer", "largest variance"],
)
def test_structures_and_subsets_of_several_passes(laplace):
    x, y = numbers(FLOAT64)
    joint = po.Joint(network([3, 4, 1], FLOAT64), Gaussian(0.3), Normal(0.7), 20)
    q, trace = po.infer(OnlineLaplace(MAP(steps=100, batch_size=10), laplace, rounds=3), joint, (x, y), progress=False)
    assert len(trace["log_evidence"]) == 4
    assert trace["log_evidence"][-1] == pytest.approx(float(q.log_evidence), abs=1e-9)
    alone, _ = po.infer(laplace, dataclasses.replace(q.joint, random="*"), (x, y), start=q.point(), progress=False)
    torch.testing.assert_close(q.log_evidence, alone.log_evidence)
    torch.testing.assert_close(q.gaussian.precision.covariance(), alone.gaussian.precision.covariance())


def test_classification_with_batch_norm():
    x, y = labels(FLOAT64)
    first, last = network([3, 4], FLOAT64), network([4, 2], FLOAT64)
    net = nn.Sequential(first, nn.BatchNorm1d(4, dtype=FLOAT64), nn.Tanh(), last)
    joint = po.Joint(net, Categorical(), Normal(), 20)
    method = OnlineLaplace(MAP(steps=60, batch_size=10), rounds=3)
    q, trace = po.infer(method, joint, (x, y), progress=False)
    assert "noise_scale" not in trace
    assert bool((q.buffers["1.running_mean"] != 0).all())
    assert bool(torch.isfinite(q.predict(x).probs).all())


def test_when_it_passes_over_the_data():
    method = OnlineLaplace(MAP(steps=100), rounds=4, burn_in=0.2)
    assert method.stops == (20, 40, 60, 80, 100)
    assert OnlineLaplace(MAP(steps=1), rounds=4, burn_in=0.0).stops == (1,)
    assert OnlineLaplace(MAP(steps=3), rounds=9, burn_in=0.0).stops == (1, 2, 3)


def test_batches_of_two_feeds():
    letters, digits = (Feed(len(text), lambda start, text=text: iter(text[start:])) for text in ("abcde", "12"))
    for after, expected in (((), "abcde"), ((2, 5), "ab12cde12"), ((1, 2, 4), "a12b12cd12e")):
        feed = letters.with_passes(digits, after)
        assert len(feed) == len(expected)
        for start in range(len(expected) + 1):
            assert "".join(feed.from_step(start)) == expected[start:]


@pytest.mark.parametrize("kill", [7, 17])
def test_a_killed_run_resumes_to_the_bit(kill, tmp_path):
    """Passes of four batches after 5, 10, 15 and 20 steps: once inside a pass, once between two."""
    x, y = numbers(FLOAT64)
    joint = po.Joint(network([3, 4, 1], FLOAT64), Gaussian(0.3, learn=True), Normal(0.7), 20)
    method = OnlineLaplace(
        MAP(steps=20, batch_size=6), Laplace(structure=Diagonal(), tuning=None, batch_size=6), rounds=3, burn_in=0.25
    )
    assert method.stops == (5, 10, 15, 20)
    whole, whole_trace = po.infer(method, joint, (x, y), progress=False)
    with pytest.raises(KilledError):
        po.infer(method, joint, (x, y), checkpoint=Checkpoint(tmp_path, steps=1), callbacks=[KillAfter(kill)])
    again, trace = po.infer(method, joint, (x, y), checkpoint=Checkpoint(tmp_path, steps=1))
    assert torch.equal(again.point(), whole.point())
    assert again.joint.prior == whole.joint.prior
    assert again.joint.likelihood == whole.joint.likelihood
    for name in whole_trace:
        assert torch.equal(trace[name], whole_trace[name])


def test_what_cannot_be_tuned_is_refused():
    x, y = numbers(FLOAT64)
    joint = po.Joint(network([3, 1], FLOAT64), Gaussian(0.3), Normal(0.7), 20)
    with pytest.raises(ValueError, match="a Normal prior"):
        po.infer(
            OnlineLaplace(tuning=Evidence()), dataclasses.replace(joint, prior=po.priors.StudentT(degrees=3.0)), (x, y)
        )
    with pytest.raises(ValueError, match="one theta at a time"):
        po.infer(OnlineLaplace(), joint, (x, y), start=joint.initial().expand(2, -1))
    with pytest.raises(ValueError, match="burn_in"):
        OnlineLaplace(burn_in=1.0)
    with pytest.raises(ValueError, match="rounds"):
        OnlineLaplace(rounds=0)
    with pytest.raises(TypeError, match="of kind Tuning"):
        OnlineLaplace(tuning="evidence")


def test_its_plan_has_the_curvature_and_the_state_of_the_optimiser():
    x, y = numbers(FLOAT64)
    joint = po.Joint(network([3, 4, 1], FLOAT64), Gaussian(0.3), Normal(0.7), 20)
    data = po.model.as_data((x, y))
    method = OnlineLaplace(MAP(steps=100, batch_size=10), Laplace(tuning=None)).settled(joint, data)
    parts = method.footprint(joint, data).parts
    assert parts["curvature and precision"] == method.laplace.footprint(joint, data).parts["curvature and precision"]
    assert set(method.fit.footprint(joint, data).parts) <= set(parts)
    assert po.plan(method, joint, (x, y)).predictions == method.footprint(joint, data).predictions
