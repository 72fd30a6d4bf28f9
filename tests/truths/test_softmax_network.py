"""Laplace and its linearised predictives on a 2-3-3 tanh softmax network at given weights."""

import pytest
import torch
from goldcases import load
from torch import nn

import posterity as po
from posterity.curvature import Diagonal, Full, Kronecker
from posterity.predictive import Exact, LaplaceBridge, MonteCarlo, Probit, laplace_bridge

CASE = load("kfac_softmax_network")
STRUCTURES = {"full_ggn": Full(), "diag_ggn": Diagonal(), "kfac": Kronecker()}


def fitted(structure, batch_size=3):
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 3)).double()
    with torch.no_grad():
        for layer, matrix in ((net[0], CASE.inputs["W1"]), (net[2], CASE.inputs["W2"])):
            layer.weight.copy_(matrix[:, :-1])
            layer.bias.copy_(matrix[:, -1])
    prior = po.priors.Normal(scale=CASE.inputs["alpha"] ** -0.5)
    joint = po.Joint(net, po.likelihoods.Categorical(), prior, num_data=4)
    method = po.methods.Laplace(structure=structure, tuning=None, batch_size=batch_size)
    return po.infer(method, joint, (CASE.inputs["X"], CASE.inputs["y"].long()), progress=False)[0]


@pytest.mark.parametrize("batch_size", [1, 3, 4])
@pytest.mark.parametrize("name", STRUCTURES)
def test_the_precision(name, batch_size):
    q = fitted(STRUCTURES[name], batch_size)
    CASE.check(f"logdet.{name}", q.gaussian.precision.logdet)
    if name == "full_ggn":
        CASE.check("laplace_log_evidence", q.log_evidence)


@pytest.mark.parametrize("row", [0, 1])
@pytest.mark.parametrize("name", STRUCTURES)
def test_the_predictive(name, row):
    q, x, path = fitted(STRUCTURES[name]), CASE.inputs["X_test"], f"predictive.{row}"
    mean, covariance = q.output_moments(x)
    CASE.check(f"{path}.logit_mean", mean[row])
    CASE.check(f"{path}.plugin", mean[row].softmax(-1))
    CASE.check(f"{path}.{name}.logit_cov", covariance[row])
    variance = q.output_moments(x, marginal=True)[1]
    CASE.check(f"{path}.{name}.laplace_bridge_alpha", laplace_bridge(mean, variance)[row])
    for entry, integrator in (
        ("exact", Exact()),
        ("meanfield_probit", Probit()),
        ("laplace_bridge", LaplaceBridge()),
        ("laplace_bridge_projected", LaplaceBridge(project=True)),
    ):
        CASE.check(f"{path}.{name}.{entry}", q.predict(x, integrator=integrator).probs[row])
    assert torch.equal(q.predict(x).probs, q.predict(x, integrator=Probit()).probs)


@pytest.mark.parametrize("name", STRUCTURES)
def test_draws_of_outputs_come_to_the_integral(name):
    """Of each row by itself, and of functions that all rows share."""
    q, x, draws = fitted(STRUCTURES[name]), CASE.inputs["X_test"], 40_000
    exact = q.predict(x, integrator=Exact()).probs
    bound = 5 * 0.5 / draws**0.5
    apart = q.predict(x, integrator=MonteCarlo(draws)).probs
    shared = po.predictive.from_outputs(po.likelihoods.Categorical(), q.outputs(x, draws, po.Key(0))).probs
    torch.testing.assert_close(apart, exact, rtol=0, atol=bound)
    torch.testing.assert_close(shared, exact, rtol=0, atol=bound)


@pytest.mark.parametrize("name", STRUCTURES)
def test_weight_sampling_is_another_predictive(name):
    """It runs the network at each draw, so that its logits are those of no linear function."""
    q, x, draws = fitted(STRUCTURES[name]), CASE.inputs["X_test"], 4_000
    outputs = q.gaussian.outputs(x, draws, po.Key(0))
    by_hand = torch.stack([q.joint.outputs(theta, x) for theta in q.sample(3, po.Key(0))])
    assert outputs.shape == (draws, 2, 3)
    assert not torch.allclose(by_hand, q.outputs(x, 3, po.Key(0)), atol=1e-3)
    difference = (outputs.mean(0) - q.output_moments(x)[0]).abs()  # the mean of a bent function is not its value
    assert float((difference / (outputs.std(0) / draws**0.5)).max()) > 5
