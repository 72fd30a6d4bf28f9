"""Defaults of SWAG, SGLD and SGHMC against the exact posterior of linear models, and what they warn of."""

import dataclasses
import logging

import pytest
import torch
from drawn import normal
from torch import Tensor, nn

import posterity as po
from posterity.inference import Trace
from posterity.likelihoods import Gaussian
from posterity.methods import MAP, SGHMC, SGLD, SWAG, Fisher, Plain, RMSprop
from posterity.methods.parts.gradient_runs import risen, usual_rate
from posterity.numerics import Key
from posterity.optim import SGD, Cycles, GradientScale, StationarySGD
from posterity.priors import Normal

FLOAT64 = torch.float64
SHORT = {"draws": 100, "warmup": 600, "thin": 20}


def line(noise: float, rows: int = 120, learn: bool = False) -> tuple[po.Joint, tuple[Tensor, Tensor], Tensor, Tensor]:
    """A linear regression with correlated columns: joint, data, mean and standard deviations of the posterior."""
    x = normal(Key(0), rows, 3)
    x = x + 0.5 * x[:, :1]
    y = x @ torch.tensor([[1.0], [-0.5], [0.2]], dtype=FLOAT64) + noise * normal(Key(1), rows, 1)
    net = nn.Linear(3, 1, bias=False).double()
    nn.init.ones_(net.weight)
    joint = po.Joint(net, Gaussian(0.3, learn=True) if learn else Gaussian(noise), Normal(scale=1.0), num_data=rows)
    precision = x.T @ x / noise**2 + torch.eye(3, dtype=FLOAT64)
    mean = torch.linalg.solve(precision, x.T @ y / noise**2).squeeze(1)
    return joint, (x, y), mean, torch.linalg.inv(precision).diagonal().sqrt()


@pytest.mark.parametrize(
    ("method", "noise"),
    [(SGLD(batch_size=16), 0.02), (SGHMC(batch_size=None), 0.02), (SGHMC(batch_size=16), 5.0)],
    ids=["sgld", "sghmc on all rows", "sghmc"],
)
def test_samplers_have_the_width_of_the_posterior_at_any_noise(method, noise, caplog) -> None:
    joint, data, mean, scale = line(noise)
    q, trace = po.infer(dataclasses.replace(method, **SHORT), joint, data)
    theta = q.theta.flatten(0, 1).cpu()
    ratio = theta.std(0) / scale.cpu()
    assert 0.7 < float(ratio.min()) < float(ratio.max()) < 1.4
    assert float(((theta.mean(0) - mean.cpu()) / scale.cpu()).abs().max()) < 0.6
    for name in ("kinetic_temperature", "configurational_temperature"):
        if name in trace:
            assert 0.7 < float(trace[name][600:].mean()) < 1.4
    assert not caplog.records


@pytest.mark.parametrize(("noise", "learn"), [(0.02, True), (5.0, False)])
def test_swag_has_the_width_of_the_posterior_at_any_noise(noise, learn, caplog) -> None:
    joint, data, mean, scale = line(noise, learn=learn)
    q, _ = po.infer(SWAG(warmup=1000), joint, data)
    ratio = q.variance.sqrt() / scale
    assert 0.4 < float(ratio.min()) < float(ratio.max()) < 1.5
    assert float(((q.mean - mean) / scale).abs().max()) < 0.6
    assert not caplog.records


def test_left_out_settings_follow_the_rows_and_given_ones_stay() -> None:
    joint, data, _, _ = line(0.3)
    rows = po.as_data(data)
    chains = SGLD(batch_size=6).settled(joint, rows)
    assert (chains.warmup, chains.draws, chains.thin, chains.preconditioner) == (2000, 100, 200, Fisher(0.03))
    assert SGHMC(thin=3).settled(joint, rows).thin == 3
    for given, thin in ((SGLD(step_size=0.1), 20), (SGLD(schedule=Cycles(40)), 10), (SGLD(warmup=0), 20)):
        settled = given.settled(joint, rows)
        assert (settled.preconditioner, settled.draws, settled.thin) == (Plain(), 100, thin)
    assert SGLD(preconditioner=RMSprop()).settled(joint, rows).preconditioner == RMSprop()
    wandering = SWAG().settled(joint, rows)
    assert (wandering.fit.batch_size, wandering.fit.steps, wandering.warmup, wandering.every) == (4, 3600, 2400, 12)
    assert wandering.fit.optimizer == StationarySGD(1.0, 2400, 30.0, usual_rate(joint), 1.0)
    fit = MAP(400, 20, SGD(0.05), po.optim.Constant())
    assert SWAG(fit).settled(joint, rows) == SWAG(fit, every=20, warmup=0)


def recorded(**columns: Tensor) -> Trace:
    trace = Trace()
    for step in range(len(next(iter(columns.values())))):
        trace.record(step + 1, {name: values[step] for name, values in columns.items()})
    return trace


def test_a_loss_that_rises_is_told_and_noise_of_batches_is_not() -> None:
    noise = normal(Key(3), 400, 1)
    falling, rising = torch.linspace(3.0, 1.0, 400).unsqueeze(1) + 0.2 * noise, 1.0 + 5.0 * torch.ones(400, 1) + noise
    rising[:5] = 1.0
    assert not risen("SWAG", recorded(loss=falling))
    assert not risen("SWAG", recorded(loss=1.0 + noise))
    assert "from 1 to" in risen("SWAG", recorded(loss=rising))[0]
    assert not risen("SWAG", recorded(loss=rising), expected=8.0)
    assert "in 1 of 2 rows" in risen("SWAG", recorded(loss=torch.cat([falling, rising], 1)))[0]


def test_temperatures_that_are_off_are_told_with_the_remedy() -> None:
    joint, _, _, _ = line(0.3)
    method = SGHMC(10, 20, 2, thin=20, step_size=0.1)
    level = torch.ones(220, 2, dtype=FLOAT64)
    noise = normal(Key(0), 220, 2)
    good = {"loss": level + noise, "kinetic_temperature": 1.0 + 0.5 * noise, "configurational_temperature": 1 + noise}
    assert not method.doubts(joint, recorded(**good))
    cold = method.doubts(joint, recorded(**{**good, "configurational_temperature": 0.01 * level}))
    assert len(cold) == 1
    assert "configurational temperature is 0.01" in cold[0]
    assert "larger step_size" in cold[0]
    hot = method.doubts(joint, recorded(**{**good, "kinetic_temperature": 3.0 * level}))
    assert "kinetic temperature is 3" in hot[0]
    assert "smaller step_size" in hot[0]
    apart = good["loss"] + torch.tensor([0.0, 3.0], dtype=FLOAT64)
    assert "have not mixed" in method.doubts(joint, recorded(**{**good, "loss": apart}))[-1]


def test_a_run_of_too_large_steps_warns(caplog) -> None:
    joint, data, _, scale = line(0.3)
    size = 1.99 / float((1.0 / scale.square()).max()) / 2.0
    with caplog.at_level(logging.WARNING, logger="posterity"):
        po.infer(SGLD(20, 100, 2, step_size=float(size), batch_size=8, thin=5), joint, data)
    assert any("configurational temperature" in record.getMessage() for record in caplog.records)


def test_scales_of_gradients_are_learnt_alike_on_every_device() -> None:
    """A CPU takes one branch, a recorded step all of them."""
    rule, theta, warmup = GradientScale(0.01), normal(Key(0), 2, 3), 8
    known = rule.init(theta)
    for step in range(10):
        grad, number = normal(Key(step + 1), 2, 3), torch.tensor(float(step), dtype=FLOAT64)
        before, known = known, rule.learn(known, theta, grad, number, warmup)
        assert torch.isfinite(torch.cat([part.flatten() for part in known])).all()
    assert all(map(torch.equal, before, known))  # nothing is learnt after the warm-up


@pytest.mark.parametrize(("rows", "steps"), [(100, 3000), (5000, 3906), (100_000, 20_000)])
def test_one_rule_for_the_steps_of_all_fits(rows, steps) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(1, 2), torch.nn.Dropout(0.1), torch.nn.Linear(2, 1))
    joint = po.Joint(net, po.likelihoods.Gaussian(scale=1.0), po.priors.Normal(scale=1.0), rows)
    data = po.as_data((torch.zeros(rows, 1), torch.zeros(rows, 1)))
    assert po.methods.MAP(batch_size=128).stepped(joint, data).steps == steps
    assert po.methods.MCDropout(batch_size=128).settled(joint, data).steps == steps
    for kind in (po.methods.MeanField, po.methods.NaturalGradient, po.methods.LowRankGaussian):
        assert kind(batch_size=128).settled(joint, data).steps == steps
