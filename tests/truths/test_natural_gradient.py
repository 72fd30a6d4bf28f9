"""Natural-gradient variational inference against optima in closed form and by quadrature."""

import pytest
import torch
from drawn import normal
from goldcases import load
from torch import nn

import posterity as po
from posterity.curvature import Hessian
from posterity.likelihoods import Bernoulli, Categorical, Gaussian
from posterity.methods import LocalReparameterisation, MeanField, NaturalGradient, SecondOrder, WeightSampling
from posterity.numerics import Key
from posterity.optim import Adam, Cosine
from posterity.priors import FanIn, Hierarchical, Laplace, Layerwise, LogNormal, Normal

FLOAT64 = torch.float64
EXACT = {"batch_size": None, "estimator": SecondOrder(), "beta1": 0.0, "beta2": 0.0, "bend": 0.0, "radius": None}


def linear(columns: int) -> nn.Linear:
    net = nn.Linear(columns, 1, bias=False).to(FLOAT64)
    nn.init.zeros_(net.weight)
    return net


def gold_problem(row: int) -> tuple[po.Joint, tuple[torch.Tensor, torch.Tensor], dict[str, torch.Tensor]]:
    case = load("linear_meanfield_vi")
    given, wanted = case.inputs, case.expected["rows"][row]
    noise, prior = Gaussian(given["beta"] ** -0.5), Normal(given["alpha"] ** -0.5)
    joint = po.Joint(linear(2), noise, prior, num_data=7, tempering=po.Tempering.tempered(wanted["eta"]))
    return joint, (given["X"], given["y"].unsqueeze(1)), wanted


@pytest.mark.parametrize("row", [0, 1, 2])
def test_exact_optimum_of_linear_regression(row: int) -> None:
    """Without draws: the precisions after one step of rate 1, the means by Jacobi iterations, and the gold bound."""
    joint, data, wanted = gold_problem(row)
    once, _ = po.infer(NaturalGradient(steps=1, step_size=1.0, **EXACT), joint, data)
    torch.testing.assert_close(once.variance.sqrt(), wanted["std"], rtol=1e-8, atol=1e-10)
    q, trace = po.infer(NaturalGradient(steps=60, step_size=1.0, **EXACT), joint, data)
    torch.testing.assert_close(q.mean, wanted["mean"], rtol=1e-8, atol=1e-10)
    assert float(trace["data_fit"][-1]) * 7 == pytest.approx(wanted["expected_log_lik"], rel=1e-8)
    assert float(trace["kl"][-1]) * 7 == pytest.approx(wanted["kl_to_prior"], rel=1e-8)
    assert float(trace["loss"][-1]) * 7 == pytest.approx(-wanted["elbo_eta"] / wanted["eta"], rel=1e-8)


@pytest.mark.parametrize("curvature", [None, Hessian()])
def test_one_step_is_the_posterior_where_the_hessian_is_diagonal(curvature: Hessian | None) -> None:
    """Orthogonal columns, prior means and scales of their own, both powers: theory has rate 1 arrive at once."""
    x = torch.tensor([[1.0, 1.0], [1.0, -1.0], [1.0, 1.0], [1.0, -1.0]], dtype=FLOAT64)
    y = torch.tensor([[0.3], [-1.0], [0.9], [0.2]], dtype=FLOAT64)
    prior = Normal(torch.tensor([[0.5, 2.0]], dtype=FLOAT64), torch.tensor([0.4, -1.0], dtype=FLOAT64))
    joint = po.Joint(linear(2), Gaussian(0.3), prior, num_data=4, tempering=po.Tempering(0.4, 0.8))
    settings = EXACT if curvature is None else {**EXACT, "estimator": SecondOrder(curvature)}
    q, _ = po.infer(NaturalGradient(steps=1, step_size=1.0, **settings), joint, (x, y))
    exact = po.infer(po.methods.Conjugate(), joint, (x, y))[0].gaussian
    torch.testing.assert_close(q.mean, exact.mean, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(q.precision.covariance(), exact.precision.covariance(), rtol=1e-9, atol=1e-12)
    again, _ = po.infer(NaturalGradient(steps=2, step_size=1.0, **settings), joint, (x, y))
    torch.testing.assert_close(again.mean, q.mean)  # it stays there
    bent, _ = po.infer(NaturalGradient(steps=1, step_size=1.0, **{**settings, "bend": 0.5}), joint, (x, y))
    assert float((bent.variance / q.variance - 1.0).abs().max()) > 0.01  # the bent step does not arrive at once


@pytest.mark.parametrize("row", [0, 1, 2])
def test_draws_reach_the_optimum_of_linear_regression(row: int) -> None:
    joint, data, wanted = gold_problem(row)
    method = NaturalGradient(
        steps=800,
        batch_size=None,
        step_size=0.1,
        schedule=Cosine(),
        estimator=WeightSampling(4, antithetic=True),
        beta2=0.993,
        initial_scales=FanIn(0.3),
    )
    q, trace = po.infer(method, joint, data)
    torch.testing.assert_close(q.mean, wanted["mean"], rtol=2e-3, atol=0.0)
    # 5 standard errors: the precision averages some 4 / (1 - beta2) draws that spread by 100 %, the std half
    torch.testing.assert_close(q.variance.sqrt(), wanted["std"], rtol=0.12, atol=0.0)
    assert abs(float(trace["kl"][-1]) * 7 - wanted["kl_to_prior"]) < 0.2
    fit = trace["data_fit"][-300:] * 7
    assert abs(float(fit.mean()) - wanted["expected_log_lik"]) < 5.0 * float(fit.std()) / 300**0.5 + 0.05


@pytest.mark.parametrize("name", ["eta_1", "eta_0.3"])
def test_optimum_of_logistic_regression(name: str) -> None:
    case = load("logistic_variational")
    given, wanted = case.inputs, case.expected["meanfield"][name]
    tempering = po.Tempering.tempered(wanted["eta"])
    joint = po.Joint(linear(2), Bernoulli(), Normal(given["prior_std"]), num_data=10, tempering=tempering)
    method = NaturalGradient(
        steps=600,
        batch_size=None,
        step_size=0.1,
        schedule=Cosine(),
        estimator=LocalReparameterisation(16),
        beta2=0.99,
        initial_scales=FanIn(0.5),
    )
    q, trace = po.infer(method, joint, (given["X"], given["t"]))
    torch.testing.assert_close(q.mean, wanted["mean"], rtol=0.03, atol=0.0)
    torch.testing.assert_close(q.variance.sqrt(), wanted["std"], rtol=0.05, atol=0.0)
    assert abs(float(trace["kl"][-1]) * 10 - wanted["kl"]) < 0.1


@pytest.mark.parametrize(
    ("prior", "tolerance"),
    [
        (Laplace(0.7), 2e-3),
        (Layerwise({"weight": Normal(0.3, 0.2)}), 2e-3),
        (Hierarchical(Normal(1.0), LogNormal(1.0, 0.5)), 0.17),  # its part comes from draws: 5 standard errors
    ],
    ids=["laplace", "layerwise", "hierarchical"],
)
def test_other_priors_have_the_optimum_of_mean_field(prior: po.priors.Prior, tolerance: float) -> None:
    x = normal(Key(5), 12, 1)
    y = 1.3 * x + 0.5 * normal(Key(6), 12, 1)
    joint = po.Joint(linear(1), Gaussian(0.5), prior, num_data=12)
    common = {"batch_size": None, "estimator": SecondOrder(), "schedule": Cosine()}
    ours, _ = po.infer(NaturalGradient(steps=150, step_size=0.3, beta1=0.0, beta2=0.9, **common), joint, (x, y))
    theirs, _ = po.infer(MeanField(steps=300, optimizer=Adam(0.1), **common), joint, (x, y))
    torch.testing.assert_close(ours.mean, theirs.mean, rtol=1e-3, atol=0.0)
    torch.testing.assert_close(ours.variance, theirs.variance, rtol=tolerance, atol=0.0)


def test_a_density_is_data_and_prior_in_one() -> None:
    precision = torch.tensor([[2.0, 0.6], [0.6, 3.0]], dtype=FLOAT64)
    density = po.Density(lambda w: -0.5 * (w - 1.0) @ precision @ (w - 1.0), {"w": (2,)}, dtype=FLOAT64)
    method = NaturalGradient(
        steps=60, step_size=1.0, beta1=0.0, beta2=0.0, bend=0.0, radius=None, estimator=SecondOrder(Hessian())
    )
    q, _ = po.infer(method, density, None)
    torch.testing.assert_close(q.mean, torch.ones(2, dtype=FLOAT64))
    torch.testing.assert_close(q.precision.entries, precision.diagonal())


def test_subsets_keep_the_other_weights_as_points() -> None:
    net = po.networks.MLP([2, 3, 1], activation="tanh").to(FLOAT64)
    joint = po.Joint(net, Gaussian(0.3, learn=True), Normal(1.0), num_data=20, random="2.*")
    x = normal(Key(1), 20, 2)
    q, _ = po.infer(NaturalGradient(steps=20), joint, (x, x[:, :1]))
    assert q.precision.size == 4
    assert torch.equal(q.sample(3, Key(0))[:, :9], q.mean[:9].expand(3, -1))
    assert not torch.equal(q.mean[:9], joint.initial()[:9])
    assert not torch.equal(q.mean[9:], joint.initial()[9:13])
    assert q.joint.likelihood.num_free == 0
    assert float(q.joint.likelihood.scale) != 0.3


def test_precisions_stay_positive_under_wild_estimates() -> None:
    """Rate 1 and one draw: estimates are often far below zero."""
    joint = po.Joint(po.networks.MLP([2, 5, 2]).to(FLOAT64), Categorical(), Normal(1.0), num_data=30)
    x = normal(Key(2), 30, 2)
    method = NaturalGradient(steps=100, step_size=0.01, beta2=0.0, initial_scales=FanIn(1.0), radius=1.0)
    q, trace = po.infer(method, joint, (x, (x[:, 0] > 0).long()))
    assert bool((q.precision.entries > 0).all())
    assert bool(torch.isfinite(trace["loss"]).all())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": 0}, "NaturalGradient.steps must be"),
        ({"step_size": -0.1}, "NaturalGradient.step_size must be a positive number"),
        ({"beta2": 1.0}, "NaturalGradient.beta2 must be at least 0 and below 1"),
        ({"bend": 0.3}, "NaturalGradient.bend must be 0.5 or 0"),
        ({"radius": 0.0}, "NaturalGradient.radius must be a positive number"),
        ({"optimizer": Adam}, "NaturalGradient.optimizer must be of kind Optimizer"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        NaturalGradient(**settings)
    with pytest.raises(TypeError, match=r"SecondOrder.curvature must be"):
        SecondOrder("gauss-newton")
