"""Variational inference of full rank against exact posteriors and optima by quadrature."""

import pytest
import torch
from goldcases import load
from torch import nn

import posterity as po
from posterity.likelihoods import Bernoulli, Gaussian
from posterity.methods import Conjugate, FullRank, MeanField
from posterity.numerics import Key
from posterity.optim import Adam, Cosine
from posterity.priors import FanIn, Normal

FLOAT64 = torch.float64


def linear(columns: int) -> nn.Linear:
    net = nn.Linear(columns, 1, bias=False).to(FLOAT64)
    nn.init.zeros_(net.weight)
    return net


@pytest.mark.parametrize("powers", [(1.0, 1.0), (0.4, 0.8)])
def test_reaches_the_posterior_of_linear_regression(powers: tuple[float, float]) -> None:
    """Without noise at the end: mean and covariance are exact, and each draw's ELBO is the log evidence."""
    given = load("linear_meanfield_vi").inputs
    rows = given["X"], given["y"].unsqueeze(1)
    prior, noise = Normal(given["alpha"] ** -0.5), Gaussian(given["beta"] ** -0.5)
    joint = po.Joint(linear(2), noise, prior, num_data=7, tempering=po.Tempering(*powers))
    exact = po.infer(Conjugate(), joint, rows)[0].gaussian
    method = FullRank(steps=2500, batch_size=None, optimizer=Adam(0.03), schedule=Cosine(), initial_scales=FanIn(0.3))
    q, trace = po.infer(method, joint, rows)
    torch.testing.assert_close(q.mean, exact.mean, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(q.precision.covariance(), exact.precision.covariance(), rtol=1e-3, atol=1e-6)
    if powers == (1.0, 1.0):
        evidence = load("linear_meanfield_vi").at("rows.1.log_evidence")
        assert abs(float(trace["elbo"][-1]) * 7 - evidence) < 1e-3
    torch.testing.assert_close(trace["elbo"], trace["data_fit"] - trace["kl"])


def test_optimum_of_logistic_regression() -> None:
    case = load("logistic_variational")
    joint = po.Joint(linear(2), Bernoulli(), Normal(case.inputs["prior_std"]), num_data=10)
    method = FullRank(
        steps=1500, batch_size=None, draws=4, optimizer=Adam(0.01), schedule=Cosine(), initial_scales=FanIn(0.5)
    )
    q, trace = po.infer(method, joint, (case.inputs["X"], case.inputs["t"]))
    # In units of the scales the noise of the last steps has standard deviations of some 0.012 in the means, 0.025 in
    # the variances and 0.004 in the correlation, which is 0.094.
    scale = case.at("full.cov").diagonal().sqrt()
    assert float(((q.mean - case.at("full.mean")) / scale).abs().max()) < 0.06
    apart = ((q.precision.covariance() - case.at("full.cov")) / (scale * scale[:, None])).abs()
    assert float(apart.diagonal().max()) < 0.13
    assert float(apart[0, 1]) < 0.02
    elbo = trace["elbo"][-200:] * 10
    assert abs(float(elbo.mean()) - case.at("full.elbo")) < 5.0 * float(elbo.std()) / 200**0.5 + 0.005


def test_subsets_keep_the_other_weights_as_points() -> None:
    net = po.networks.MLP([2, 3, 1], activation="tanh").to(FLOAT64)
    joint = po.Joint(net, Gaussian(0.3, learn=True), Normal(1.0), num_data=20, random="2.*")
    x = Key(1).normal((20, 2), FLOAT64)
    q, _ = po.infer(FullRank(steps=20), joint, (x, x[:, :1]))
    assert q.precision.size == 4
    assert torch.equal(q.sample(3, Key(0))[:, :9], q.mean[:9].expand(3, -1))
    assert not torch.equal(q.mean[:9], joint.initial()[:9])
    assert q.joint.likelihood.num_free == 0


def test_one_weight_is_mean_field() -> None:
    """The families are the same; so are their optima."""
    x, y = torch.linspace(-1, 1, 9, dtype=FLOAT64).unsqueeze(1), torch.linspace(-2, 2, 9, dtype=FLOAT64).unsqueeze(1)
    joint = po.Joint(linear(1), Gaussian(0.5), Normal(), num_data=9)
    settings = {"steps": 1500, "batch_size": None, "optimizer": Adam(0.03), "schedule": Cosine()}
    full, _ = po.infer(FullRank(**settings), joint, (x, y))
    factorised, _ = po.infer(MeanField(**settings, estimator=po.methods.StickTheLanding()), joint, (x, y))
    torch.testing.assert_close(full.mean, factorised.mean, rtol=1e-4, atol=0.0)
    torch.testing.assert_close(full.variance, factorised.variance, rtol=1e-3, atol=0.0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": 0}, "FullRank.steps must be"),
        ({"draws": 0}, "FullRank.draws must be"),
        ({"optimizer": Adam}, "FullRank.optimizer must be of kind Optimizer"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        FullRank(**settings)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_follows_float32(dtype: torch.dtype) -> None:
    x, y = Key(1).normal((20, 2)), Key(2).normal((20, 1))
    found = []
    for kind in (torch.float32, dtype):
        net = torch.nn.Linear(2, 1)
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.fill_(0.5)
        joint = po.Joint(net.to(kind), po.likelihoods.Gaussian(1.0), po.priors.Normal(1.0), num_data=20)
        q, _ = po.infer(po.methods.FullRank(steps=3, batch_size=None), joint, (x.to(kind), y.to(kind)))
        found.append(q)
    torch.testing.assert_close(found[0].mean, found[1].mean.float(), rtol=0.02, atol=0.02)
    torch.testing.assert_close(found[0].variance, found[1].variance, rtol=0.1, atol=0.0)
