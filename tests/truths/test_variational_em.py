"""Variational EM against what is known of linear models: gold rounds, their limit, and the mean-field fixed point."""

import pytest
import torch
from goldcases import GoldCase, load
from torch import Tensor, nn

import posterity as po
from posterity.evidence import NoiseScale, PriorScale, Shared
from posterity.inference import Method
from posterity.methods import NUTS, Conjugate, MeanField, NaturalGradient, SecondOrder, VariationalEM, WeightSampling
from posterity.optim import Adam, Cosine

STEPS = (PriorScale(Shared()), NoiseScale())


@pytest.fixture
def gold() -> GoldCase:
    return load("hyperparameter_em")


def problem(gold: GoldCase) -> tuple[po.Joint, tuple[Tensor, Tensor]]:
    design, targets = gold.inputs["X"], gold.inputs["y"]
    noise = po.likelihoods.Gaussian(gold.inputs["beta0"] ** -0.5)
    prior = po.priors.Normal(gold.inputs["alpha0"] ** -0.5)
    net = nn.Linear(design.shape[1], 1, bias=False).double()
    with torch.no_grad():
        net.weight.zero_()
    return po.Joint(net, noise, prior, num_data=len(design)), (design, targets.reshape(-1, 1))


def fit(method: Method, gold: GoldCase, **options: object) -> tuple[po.posteriors.Posterior, po.inference.Trace]:
    return po.infer(method, *problem(gold), **options)


def natural_gradient(steps: int) -> NaturalGradient:
    """Exact steps: precisions at once, means by Jacobi iterations that halve their way."""
    return NaturalGradient(steps, None, 0.5, estimator=SecondOrder(), beta1=0.0, beta2=0.0, bend=0.0, radius=None)


def mean_field_limit(gold: GoldCase) -> tuple[float, float]:
    """alpha and beta where the M-steps of the best factorised Gaussian lead back to them."""
    design, targets = gold.inputs["X"], gold.inputs["y"]
    alpha, beta = 1.0, 1.0
    for _ in range(500):
        precision = alpha * torch.eye(2, dtype=torch.float64) + beta * design.T @ design
        mean, variance = beta * torch.linalg.solve(precision, design.T @ targets), 1.0 / precision.diagonal()
        squares = (targets - design @ mean).square().sum() + (design.square() @ variance).sum()
        alpha, beta = float(2.0 / (mean.square() + variance).sum()), float(len(targets) / squares)
    return alpha, beta


def test_rounds_are_the_gold_ones(gold):
    _, trace = fit(VariationalEM(Conjugate(4), STEPS, rounds=3, batch_size=3), gold)
    for index in range(3):
        gold.check(f"em_iterations.{index}.log_evidence_before", trace["bound"][index])
        gold.check(f"em_iterations.{index}.alpha", trace["prior_scale"][index, 0] ** -2)
        gold.check(f"em_iterations.{index}.beta", trace["noise_scale"][index] ** -2)
    assert torch.equal(trace["noise_scale"][3], trace["noise_scale"][2])  # the end has no M-step


def test_limit_is_the_gold_one_and_the_bound_never_falls(gold):
    q, trace = fit(VariationalEM(Conjugate(), STEPS, rounds=200, tolerance=1e-14), gold)
    assert len(trace["bound"]) < 100
    gold.check("limit.alpha", torch.as_tensor(q.joint.prior.scale) ** -2)
    gold.check("limit.beta", torch.as_tensor(q.joint.likelihood.scale) ** -2)
    gold.check("limit.log_evidence", q.log_evidence)
    assert bool((trace["bound"].diff() >= -1e-12).all())


def test_first_m_step_of_a_factorised_posterior_is_the_gold_one(gold):
    method = VariationalEM(natural_gradient(200), STEPS, rounds=1, burn_in=0.95, draws=4000)
    _, trace = fit(method, gold)
    gold.check("meanfield_m_step.alpha", trace["prior_scale"][0, 0] ** -2)
    # At draws log p(D | w) = constant - beta0 / 2 squares, so that the error of the one is known from the other.
    squares = 7 * trace["noise_scale"][0] ** 2
    error = 2.0 / gold.inputs["beta0"] * trace["bound_standard_error"][0]
    assert abs(squares - 7 / gold.expected["meanfield_m_step"]["beta"]) < 5 * error
    assert error < 0.02 * squares


@pytest.mark.parametrize(
    ("method", "tolerance"),
    [
        (natural_gradient(300), 0.01),
        (
            MeanField(1500, None, Adam(0.03), Cosine(), WeightSampling(4, antithetic=True)),
            0.06,  # Adam's last steps are as noisy as that
        ),
    ],
    ids=["natural gradient", "mean field"],
)
def test_factorised_posteriors_reach_their_fixed_point(method, tolerance, gold):
    q, trace = fit(VariationalEM(method, STEPS, rounds=30, draws=1000), gold)
    alpha, beta = mean_field_limit(gold)
    assert q.joint.prior.scale**-2 == pytest.approx(alpha, rel=tolerance)
    assert q.joint.likelihood.scale**-2 == pytest.approx(beta, rel=0.03 + tolerance)  # from 1,000 draws
    again = po.evidence.elbo(q, problem(gold)[1])
    assert abs(trace["bound"][-1] - again.elbo) < 5 * trace["bound_standard_error"][-1]
    assert again.elbo < gold.expected["limit"]["log_evidence"]


def test_chains_find_the_limit_within_their_error(gold):
    rounds, first = 30, 8
    method = VariationalEM(NUTS(draws=2 * rounds * 5, warmup=100, chains=4, max_depth=5), STEPS, rounds, draws=32)
    q, trace = fit(method, gold)
    assert q.theta.shape == (4, rounds * 5, 2)
    for found, limit in (
        (trace["prior_scale"][first:-1, 0].log(), gold.expected["limit"]["alpha"]),
        (trace["noise_scale"][first:-1].log(), gold.expected["limit"]["beta"]),
    ):
        away = found - found.mean()
        lag = float(((away[1:] * away[:-1]).sum() / away.square().sum()).clamp(0.0, 0.9))
        error = float(found.std()) * ((1 + lag) / (1 - lag) / len(found)) ** 0.5
        assert abs(float(found.mean()) - float(torch.as_tensor(limit).log()) / -2) < 5 * error
        assert error < 0.1
    assert not bool(q.statistics["divergent"].any())
