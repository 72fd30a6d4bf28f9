"""Variational fits with nothing set: close to their own optimum, and a word where they are not."""

import logging
import math

import pytest
import torch
from torch import Tensor

import posterity as po
from posterity.evidence import NoiseScale, PriorScale
from posterity.likelihoods import Gaussian
from posterity.methods import (
    AtMode,
    Conjugate,
    FullRank,
    LowRankGaussian,
    MeanField,
    NaturalGradient,
    PairedSampling,
    VariationalEM,
    WeightSampling,
)
from posterity.methods.parts.gradients import Factorised
from posterity.model import Batch
from posterity.networks import MLP
from posterity.numerics import Key
from posterity.optim import IVON, Adam, Constant, Cosine, ScaledAdam
from posterity.priors import FanIn, Normal

FLOAT64 = torch.float64


def regression(
    rows: int, columns: int, noise: float, prior: float, inputs: float
) -> tuple[po.Joint, tuple[Tensor, Tensor], Tensor, Tensor]:
    """A linear regression whose targets follow the model, with the precision and the mean of its exact posterior."""
    key = Key(rows)
    x = inputs * key.fold("x").normal((rows, columns))
    w = prior * key.fold("w").normal((columns + 1, 1))
    design = torch.cat([x, torch.ones(rows, 1)], 1)
    y = design @ w + noise * key.fold("y").normal((rows, 1))
    net = torch.nn.Linear(columns, 1)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(0.3 * key.fold("net").normal(tuple(parameter.shape)))
    joint = po.Joint(net, Gaussian(scale=noise), Normal(scale=prior), num_data=rows)
    design = design.double()
    precision = design.T @ design / noise**2 + torch.eye(columns + 1, dtype=FLOAT64) / prior**2
    return joint, (x, y), precision, torch.linalg.solve(precision, design.T @ y.double() / noise**2).squeeze(1)


def divergence(covariance: Tensor, mean: Tensor, precision: Tensor, target: Tensor) -> float:
    """KL of N(mean, covariance) from the Gaussian of this precision and mean `target`."""
    distance = mean.double() - target
    fit = torch.trace(precision @ covariance) + distance @ precision @ distance - len(target)
    return 0.5 * float(fit - torch.logdet(covariance) - torch.logdet(precision))


CASES = [(12, 8, 0.05, 5.0, 10.0), (300, 3, 5.0, 0.05, 0.1), (200, 5, 0.05, 1.0, 10.0)]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("method", [MeanField, NaturalGradient, FullRank, LowRankGaussian])
def test_a_conjugate_optimum_is_reached_whatever_its_units(
    method: type, case: tuple[int, int, float, float, float]
) -> None:
    joint, data, precision, target = regression(*case)
    q, _ = po.infer(method(steps=1200 if method is LowRankGaussian else 400), joint, data)
    gap = divergence(torch.diag(q.variance.double()), q.mean, precision, target)
    if method in (MeanField, NaturalGradient):
        gap -= 0.5 * float(precision.diagonal().log().sum() - torch.logdet(precision))
    else:
        covariance = q.precision.covariance() if method is LowRankGaussian else torch.linalg.inv(q.precision.matrix)
        gap = divergence(covariance.double(), q.mean, precision, target)
    assert -1e-6 < gap < 0.1


def test_a_run_that_has_converged_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    joint, data, _, _ = regression(*CASES[2])
    with caplog.at_level(logging.WARNING):
        _, trace = po.infer(MeanField(steps=1500), joint, data)
    assert not caplog.records
    assert float(trace["elbo_gap"]) < 0.1


def wave() -> tuple[po.Joint, tuple[Tensor, Tensor]]:
    x = torch.linspace(-2.0, 2.0, 60).unsqueeze(1)
    y = (2 * x).sin() + 0.2 * Key(1).normal((60, 1))
    net = MLP([1, 6, 1], activation="tanh")
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            parameter.copy_(0.5 * Key(3).fold(name).normal(tuple(parameter.shape)))
    return po.Joint(net, Gaussian(scale=0.2), Normal(scale=1.0), num_data=60), (x, y)


def test_a_run_that_stops_far_away_says_so(caplog: pytest.LogCaptureFixture) -> None:
    joint, data = wave()
    with caplog.at_level(logging.WARNING):
        _, trace = po.infer(MeanField(steps=400, batch_size=None, optimizer=Adam(1e-3)), joint, data)
    assert "MeanField has not converged" in caplog.text
    assert "Take more steps than 400" in caplog.text
    assert float(trace["elbo_gap"]) > 1.0
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        po.infer(MeanField(steps=200), joint, data)
    assert "MeanField has not converged" in caplog.text


def test_what_is_left_out_follows_the_problem() -> None:
    joint, data = wave()
    rows = po.model.data.as_data(data)
    small = MeanField().settled(joint, rows)
    assert small == MeanField(
        3000, None, ScaledAdam(0.1), Cosine(warmup=0.05), PairedSampling(8), Constant(), AtMode(40)
    )
    assert small.settled(joint, rows) == small
    many = (torch.zeros(256_000, 1), torch.zeros(256_000, 1))
    large = MeanField().settled(po.Joint(joint.network, Gaussian(0.2), Normal(), 256_000), po.model.data.as_data(many))
    assert large == MeanField(
        20_000, 128, ScaledAdam(0.01), Cosine(warmup=0.05), WeightSampling(), Constant(), FanIn(0.1)
    )
    given = MeanField(7, 6, Adam())
    assert given.settled(joint, rows) == given
    assert given == MeanField(7, 6, Adam(), Constant(), WeightSampling(), Constant(), FanIn(gain=0.1))
    assert LowRankGaussian().settled(joint, rows).rank == 10
    with pytest.raises(ValueError, match=r"MeanField\.batch_size was left out"):
        MeanField(optimizer=Adam()).batches(rows, Key(0))


@pytest.mark.parametrize("method", [MeanField, NaturalGradient, FullRank, LowRankGaussian])
def test_members_begin_at_their_modes_as_they_would_alone(method: type) -> None:
    small, data = wave()
    joint = po.Joint(MLP([1, 6, 1], activation="tanh").double(), small.likelihood, small.prior, num_data=60)
    rows = tuple(tensor.double() for tensor in data)
    starts = joint.initial() + 0.2 * Key(4).normal((2, joint.size), FLOAT64)
    together, _ = po.infer(method(steps=50), joint, rows, start=starts)
    alone, _ = po.infer(method(steps=50), joint, rows, start=starts[1])
    torch.testing.assert_close(together.member(1).mean, alone.mean, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(together.member(1).variance, alone.variance, rtol=1e-8, atol=1e-8)


def test_paired_draws_are_those_of_mirrored_weights() -> None:
    joint, data = wave()
    q = Factorised(joint.initial(), torch.full((joint.size,), 0.1), None)
    batch = joint.check(Batch(*data))
    term = PairedSampling(4).data_term(joint, q, batch, {}, {}, Key(5))
    half = Key(5).normal((2, joint.size))
    noise = torch.cat([half, -half])
    each = [joint.data_value_and_grad(q.mean + q.scale * eps, batch, {}) for eps in noise]
    torch.testing.assert_close(term.value, torch.stack([value for value, _, _ in each]).mean())
    torch.testing.assert_close(term.grad_mean, torch.stack([grad for _, grad, _ in each]).mean(0), rtol=1e-4, atol=1e-3)
    scale = torch.stack([grad * eps for (_, grad, _), eps in zip(each, noise, strict=True)]).mean(0)
    torch.testing.assert_close(term.grad_scale, scale, rtol=1e-4, atol=1e-3)


def test_variational_em_says_whether_its_bound_still_rises(caplog: pytest.LogCaptureFixture) -> None:
    joint, data, _, _ = regression(30, 3, 1.0, 1.0, 1.0)
    joint = po.Joint(joint.network, Gaussian(scale=20.0), Normal(scale=50.0), num_data=30)
    steps = (PriorScale(), NoiseScale())
    with caplog.at_level(logging.WARNING):
        q, trace = po.infer(VariationalEM(Conjugate(), steps), joint, data)
    assert "has not converged" not in caplog.text
    longer, _ = po.infer(VariationalEM(Conjugate(), steps, rounds=1000), joint, data)
    assert math.isclose(float(q.log_evidence), float(longer.log_evidence), abs_tol=0.05)
    joint = po.Joint(joint.network, Gaussian(scale=20.0), Normal(scale=50.0), num_data=30)
    with caplog.at_level(logging.WARNING):
        _, trace = po.infer(VariationalEM(Conjugate(), PriorScale(), rounds=5), joint, data)
    assert "VariationalEM has not converged" in caplog.text
    assert float(trace["bound_gap"]) > 0.1


def test_ivon_says_when_its_precisions_are_the_first_ones(caplog: pytest.LogCaptureFixture) -> None:
    _, (x, y), _, _ = regression(30, 3, 1.0, 1.0, 1.0)
    for beta2, warned in ((0.99999, True), (0.9, False)):
        net = torch.nn.Linear(3, 1)
        optimizer = IVON(net.parameters(), lr=0.1, ess=30, beta2=beta2, weight_decay=1 / 30)
        for _ in range(40):
            with optimizer.sampled_params(train=True):
                optimizer.zero_grad()
                (0.5 * (net(x) - y).square().mean()).backward()
            optimizer.step()
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            optimizer.posterior(po.Joint(net, Gaussian(scale=1.0), Normal(scale=1.0), 30), net)
        assert ("hess_init" in caplog.text) == warned


def test_ivon_left_alone_survives_a_regression_with_little_noise(caplog: pytest.LogCaptureFixture) -> None:
    joint, (x, y), precision, mean = regression(30, 3, 0.02, 1.0, 1.0)
    scale, away = torch.linalg.inv(precision).diagonal().sqrt(), []
    for falling in (True, False):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            net = torch.nn.Linear(3, 1)
        optimizer = IVON(net.parameters(), lr=0.1, ess=30, weight_decay=1 / 30)
        for step in range(3500):
            optimizer.param_groups[0]["lr"] = 0.1 * (1.0 - step / 3500) if falling else 0.1
            with optimizer.sampled_params(train=True):
                optimizer.zero_grad()
                (-joint.likelihood.log_prob(net(x), y).mean()).backward()
            optimizer.step()
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            q = optimizer.posterior(joint, net)
        assert ("Let lr fall to zero" in caplog.text) != falling
        away.append(float(((q.mean - mean) / scale).square().mean().sqrt()))
    assert away[0] < 0.3
    assert away[1] < 1.0
