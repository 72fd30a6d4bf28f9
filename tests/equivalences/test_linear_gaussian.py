"""On a linear model with Gaussian noise, Laplace is the exact posterior."""

import dataclasses

import pytest
import torch
from contracts.cases import inputs, linear_regression, numbers

import posterity as po
from posterity.curvature import GaussNewton, Hessian
from posterity.methods import MAP, Conjugate, Laplace
from posterity.numerics import Key
from posterity.optim import SGD, Cosine

FLOAT64 = torch.float64
TEMPERINGS = {
    "bayes": po.Tempering.bayes(),
    "tempered": po.Tempering.tempered(3.0),
    "cold": po.Tempering.cold(0.2),
    "both": po.Tempering(0.4, 2.5),
}
PRIORS = {
    "one scale": po.priors.Normal(0.7),
    "a mean": po.priors.Normal(0.7, mean=0.3),
    "a scale for each": po.priors.Normal(torch.tensor([[0.3, 0.6, 1.2, 2.0]], dtype=FLOAT64), mean=-0.2),
}


@pytest.mark.parametrize("curvature", [GaussNewton(), Hessian()], ids=str)
@pytest.mark.parametrize("tempering", TEMPERINGS)
@pytest.mark.parametrize("prior", PRIORS)
def test_laplace_at_the_mode_is_conjugate(prior, tempering, curvature):
    joint = dataclasses.replace(linear_regression(FLOAT64), prior=PRIORS[prior], tempering=TEMPERINGS[tempering])
    exact, _ = po.infer(Conjugate(), joint, numbers(FLOAT64))
    laplace, _ = po.infer(Laplace(tuning=None, curvature=curvature), joint, numbers(FLOAT64), start=exact)
    torch.testing.assert_close(
        laplace.gaussian.precision.matrix, exact.gaussian.precision.matrix, rtol=1e-11, atol=1e-11
    )
    torch.testing.assert_close(laplace.log_evidence, exact.log_evidence, rtol=1e-11, atol=1e-11)
    x = inputs(FLOAT64, 5)
    torch.testing.assert_close(laplace.predict(x).mean, exact.predict(x).mean, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(laplace.predict(x).variance, exact.predict(x).variance, rtol=1e-11, atol=1e-11)
    # The mean is where the gradient of the tempered log density vanishes.
    rows = po.model.Batch(*numbers(FLOAT64))
    assert joint.value_and_grad(exact.point(), rows)[1].abs().max() < 1e-9


def test_map_arrives_at_the_conjugate_mean():
    joint = linear_regression(FLOAT64)
    exact, _ = po.infer(Conjugate(), joint, numbers(FLOAT64))
    method = MAP(steps=400, batch_size=None, optimizer=SGD(0.02), schedule=Cosine())
    mode, _ = po.infer(method, joint, numbers(FLOAT64))
    torch.testing.assert_close(mode.point(), exact.point(), rtol=1e-8, atol=1e-8)


def test_several_outputs_are_several_regressions():
    x, _ = numbers(FLOAT64)
    y = Key(8).normal((20, 2), FLOAT64)
    torch.manual_seed(0)
    wide = po.Joint(torch.nn.Linear(3, 2).double(), po.likelihoods.Gaussian((0.3, 0.9)), po.priors.Normal(0.7), 20)
    both, _ = po.infer(Conjugate(), wide, (x, y))
    total = 0.0
    for column, scale in enumerate((0.3, 0.9)):
        one = po.Joint(torch.nn.Linear(3, 1).double(), po.likelihoods.Gaussian(scale), po.priors.Normal(0.7), 20)
        q, _ = po.infer(Conjugate(), one, (x, y[:, column : column + 1]))
        torch.testing.assert_close(q.predict(x).mean[:, 0], both.predict(x).mean[:, column], rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(q.predict(x).std[:, 0], both.predict(x).std[:, column], rtol=1e-11, atol=1e-11)
        total = total + q.log_evidence
    torch.testing.assert_close(both.log_evidence, total, rtol=1e-11, atol=1e-11)


def test_the_start_does_not_matter_to_conjugate():
    joint = linear_regression(FLOAT64)
    here, _ = po.infer(Conjugate(), joint, numbers(FLOAT64))
    there, _ = po.infer(Conjugate(), joint, numbers(FLOAT64), start=100.0 * joint.initial())
    assert torch.equal(here.point(), there.point())


def test_conjugate_on_the_last_layer_of_a_network():
    """Frozen features make a linear model of the head."""
    torch.manual_seed(1)
    module = po.networks.MLP([3, 4, 1], activation="tanh").double()
    joint = po.Joint(module, po.likelihoods.Gaussian(0.3), po.priors.Normal(0.7), num_data=20).with_weights("2.*")
    exact, _ = po.infer(Conjugate(batch_size=6), joint, numbers(FLOAT64))
    laplace, _ = po.infer(Laplace(tuning=None), joint, numbers(FLOAT64), start=exact)
    torch.testing.assert_close(laplace.log_evidence, exact.log_evidence, rtol=1e-11, atol=1e-11)
    features = module[1](module[0](numbers(FLOAT64)[0])).detach()
    design = torch.cat([features, torch.ones(20, 1, dtype=FLOAT64)], 1)
    expected = design.T @ design / 0.3**2 + torch.eye(5, dtype=FLOAT64) / 0.7**2
    torch.testing.assert_close(exact.gaussian.precision.matrix, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_float32_data_are_summed_in_float64(dtype):
    joint = linear_regression(dtype)
    q, _ = po.infer(Conjugate(), joint, numbers(dtype))
    high, _ = po.infer(Conjugate(), linear_regression(FLOAT64), numbers(FLOAT64))
    torch.testing.assert_close(q.log_evidence, high.log_evidence, rtol=2e-6, atol=0.0)
