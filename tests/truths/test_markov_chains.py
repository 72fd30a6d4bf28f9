"""Markov chains over all data against exact posteriors: logistic, linear, and a network with two modes."""

import math

import pytest
import torch
from goldcases import load
from torch import Tensor, nn

import posterity as po
from posterity.diagnostics import mcse_mean, rhat
from posterity.inference import Method
from posterity.likelihoods import Bernoulli, Gaussian
from posterity.methods import HMC, MALA, MAMS, NUTS, ChEES, Langevin, Metropolis
from posterity.posteriors import Samples
from posterity.priors import Normal

pytestmark = pytest.mark.cpu
FLOAT64 = torch.float64

SAMPLERS = [
    NUTS(draws=150, warmup=80, chains=64),
    HMC(draws=150, warmup=80, chains=64, steps=4),  # six steps of its size lead once around and back
    ChEES(draws=150, warmup=150, chains=128),
    MAMS(draws=150, warmup=150, chains=128),
    MALA(draws=150, warmup=150, chains=128, thin=2),
    Metropolis(draws=200, warmup=150, chains=128, thin=4),
]
every_sampler = pytest.mark.parametrize("method", SAMPLERS, ids=lambda method: type(method).__name__)


def drawn(method: Method, joint: po.Joint, data: object, seed: int = 4, **options: object) -> Samples:
    q, _ = po.infer(method, joint, data, seed=seed, accelerate="off", progress=False, **options)
    assert isinstance(q, Samples)
    return q


def assert_mean(found: Tensor, expected: Tensor) -> None:
    """Draws (C, D, K) have the means (K,) within 5 standard errors, by their effective sample sizes."""
    assert float(rhat(found).max()) < 1.02
    off = (found.mean((0, 1)) - expected).abs() / mcse_mean(found)
    assert float(off.max()) < 5.0
    assert float((mcse_mean(found) / found.flatten(0, 1).std(0)).max()) < 0.05  # and the errors say something


def second_moments(found: Tensor, mean: Tensor) -> Tensor:
    """(w - mean)(w - mean)^T of draws (C, D, K) about the exact mean, (C, D, K (K + 1) / 2)."""
    away = found - mean
    rows, columns = torch.tril_indices(len(mean), len(mean))
    return away[..., rows] * away[..., columns]


def lower(matrix: Tensor) -> Tensor:
    return matrix[tuple(torch.tril_indices(*matrix.shape))]


@every_sampler
def test_logistic_regression(method: Method) -> None:
    case = load("logistic_exact_posterior")
    inputs, targets = case.inputs["X"], case.inputs["t"]
    net = nn.Linear(2, 1, bias=False, dtype=FLOAT64)
    joint = po.Joint(net, Bernoulli(), Normal(case.inputs["prior_std"]), len(inputs))
    q = drawn(method, joint, (inputs, targets))
    mean, covariance = case.expected["posterior_mean"], case.expected["posterior_cov"]
    assert_mean(q.theta, mean)
    assert_mean(second_moments(q.theta, mean), lower(covariance))
    probabilities = (q.theta @ case.inputs["X_test"].T).sigmoid()  # (C, D, T)
    assert_mean(probabilities, case.expected["predictive"])
    total = q.num_chains * q.num_draws
    by_predict = q.predict(case.inputs["X_test"], draws=total).probs[:, 1]
    torch.testing.assert_close(by_predict, probabilities.mean((0, 1)), rtol=1e-9, atol=1e-12)


@every_sampler
def test_linear_regression(method: Method) -> None:
    case = load("linear_regression")
    inputs, targets = case.inputs["X"], case.inputs["y"].unsqueeze(-1)
    net = nn.Linear(2, 1, bias=False, dtype=FLOAT64)
    noise, prior = Gaussian(case.inputs["beta"] ** -0.5), Normal(case.inputs["alpha"] ** -0.5)
    q = drawn(method, po.Joint(net, noise, prior, len(inputs)), (inputs, targets))
    mean = case.expected["posterior_mean"]
    assert_mean(q.theta, mean)
    assert_mean(second_moments(q.theta, mean), lower(case.expected["posterior_cov"]))
    functions = q.theta @ case.inputs["X_test"].T
    assert_mean(functions, case.expected["pred_mean"])
    pred = q.predict(case.inputs["X_test"], draws=q.num_chains * q.num_draws)
    torch.testing.assert_close(pred.variance.flatten(), case.expected["pred_total_var"], rtol=0.05, atol=0.0)


class TwoWeights(nn.Module):
    """f(x) = w2 tanh(w1 x)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(1, 1, bias=False, dtype=FLOAT64)
        self.second = nn.Linear(1, 1, bias=False, dtype=FLOAT64)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


@pytest.mark.parametrize(
    "method",
    [NUTS(draws=200, warmup=100, chains=64), HMC(draws=350, warmup=100, chains=64, steps=8)],
    ids=lambda method: type(method).__name__,
)
def test_a_network_whose_posterior_has_two_modes(method: Method) -> None:
    case = load("tiny_bnn_elbo")
    x, y = case.inputs["x"].unsqueeze(-1), case.inputs["y"].unsqueeze(-1)
    joint = po.Joint(TwoWeights(), Gaussian(case.inputs["beta"] ** -0.5), Normal(case.inputs["alpha"] ** -0.5), len(x))
    start = torch.randn(64, 2, dtype=FLOAT64, generator=torch.Generator().manual_seed(5))
    q = drawn(method, joint, (x, y), start=start)
    first, second = q.theta[..., :1], q.theta[..., 1:]
    functions = second * torch.tanh(first * case.inputs["x_test"])  # (C, D, T): the same in both modes
    mean = case.expected["posterior_f_mean"]
    assert_mean(functions, mean)
    assert_mean((functions - mean).square(), case.expected["posterior_f_var"])
    assert_mean(first * second, torch.tensor([case.expected["posterior_E_w1w2"]], dtype=FLOAT64))
    both = (first > 0).double().mean()
    assert 0.1 < float(both) < 0.9  # chains are in both modes
    pred = q.predict(case.inputs["x_test"].unsqueeze(-1), draws=q.num_chains * q.num_draws)
    torch.testing.assert_close(pred.mean.flatten(), functions.mean((0, 1)), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(
        pred.epistemic.flatten(), functions.flatten(0, 1).var(0, correction=0), rtol=1e-3, atol=0
    )


def test_unadjusted_langevin_has_exactly_the_bias_of_theory() -> None:
    case = load("mcmc_steps")
    h, chains = case.inputs["h"], 4000
    density = po.Density(
        lambda x: -0.5 * (h * x.square()).sum(-1), {"x": (3,)}, batched=True, dtype=FLOAT64, device=h.device
    )
    method = Langevin(draws=5, warmup=80, chains=chains, thin=20, step_size=case.inputs["gamma"])
    q, _ = po.infer(method, density, None, accelerate="off", progress=False)
    draws = q.theta.flatten(0, 1)  # 20 steps of the slowest, 0.925^20, leave 0.04 of the variance common
    expected = case.expected["ula_stationary_var"]
    off = (draws.square().mean(0) - expected) / (expected * math.sqrt(2 * 1.1 / len(draws)))
    assert float(off.abs().max()) < 5.0
    biased = (draws.square().mean(0) - case.expected["target_var"]) / (expected * math.sqrt(2 * 1.1 / len(draws)))
    assert float(biased[1:].min()) > 10.0
    exact, _ = po.infer(
        MALA(draws=5, warmup=80, chains=chains, thin=20, step_size=0.1), density, None, accelerate="off", progress=False
    )
    draws = exact.theta.flatten(0, 1)
    wanted = case.expected["target_var"]
    assert float(((draws.square().mean(0) - wanted) / (wanted * math.sqrt(2 * 1.5 / len(draws)))).abs().max()) < 5.0
