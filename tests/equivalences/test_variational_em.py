"""Variational EM is its method where nothing moves, and rounds by hand where something does."""

import dataclasses

import pytest
import torch
from contracts.cases import linear_regression, numbers, regression

import posterity as po
from posterity.evidence import NoiseScale, PriorScale, Shared
from posterity.evidence.m_steps import Expected
from posterity.methods import MAP, SGLD, Conjugate, FullRank, Laplace, MeanField, NaturalGradient, VariationalEM
from posterity.methods.parts.expectations import expected_sums
from posterity.numerics import Key
from posterity.posteriors import Posterior

FLOAT64 = torch.float64


def unchanged(joint: po.Joint, posterior: Posterior) -> po.Joint:
    return joint


def test_m_steps_that_change_nothing_leave_the_method_as_it_is():
    joint, data, method = regression(FLOAT64), numbers(FLOAT64), MAP(20, 6)
    alone, trace = po.infer(method, joint, data)
    rounds, traced = po.infer(VariationalEM(method, unchanged, rounds=4), joint, data)
    assert torch.equal(rounds.point(), alone.point())
    assert rounds.joint.likelihood == alone.joint.likelihood
    assert torch.equal(traced["loss"], trace["loss"])


@pytest.mark.parametrize("method", [MeanField(15, 6), NaturalGradient(15, 6), SGLD(6, 3, 2, 1e-3, 6, thin=2)])
def test_batches_of_the_passes_change_nothing(method):
    joint, data = regression(FLOAT64), numbers(FLOAT64)
    steps = PriorScale(), NoiseScale()
    one, two = (po.infer(VariationalEM(method, steps, 3, batch_size=size), joint, data) for size in (None, 7))
    torch.testing.assert_close(one[0].sample(3, Key(0)), two[0].sample(3, Key(0)), rtol=1e-9, atol=1e-9)
    for name in one[1]:
        torch.testing.assert_close(one[1][name], two[1][name], rtol=1e-9, atol=1e-9)


def test_exact_rounds_are_runs_of_the_method_and_m_steps_in_turn():
    joint, data = linear_regression(FLOAT64), numbers(FLOAT64)
    steps = PriorScale(Shared()), NoiseScale()
    q, trace = po.infer(VariationalEM(Conjugate(), steps, rounds=5, tolerance=None, batch_size=6), joint, data)
    for index in range(5):
        alone, _ = po.infer(Conjugate(), joint, data)
        torch.testing.assert_close(trace["bound"][index], alone.log_evidence.cpu(), rtol=1e-12, atol=0.0)
        expected = expected_sums(alone, po.as_data(data).first(), 2, Key(0))
        for step in steps:
            joint = step(joint, alone, expected)
    alone, _ = po.infer(Conjugate(), joint, data)
    torch.testing.assert_close(q.point(), alone.point(), rtol=1e-12, atol=1e-12)
    assert q.joint.prior.scale == pytest.approx(joint.prior.scale, rel=1e-12)
    assert q.joint.likelihood.scale == pytest.approx(joint.likelihood.scale, rel=1e-12)


@pytest.mark.parametrize("method", [FullRank(10, None), Laplace(tuning=None), MAP(10, None)])
@pytest.mark.parametrize("weighted", [False, True])
def test_passes_are_sums_over_rows_whatever_their_batches(method, weighted):
    joint, (x, y) = regression(FLOAT64), numbers(FLOAT64)
    weights = torch.linspace(0.5, 2.0, len(x), dtype=FLOAT64) if weighted else None
    q, _ = po.infer(method, joint, (x, y, weights))
    rows = po.as_data((x, y, weights)).first()
    whole = expected_sums(q, rows, 7, Key(1))
    parts = [expected_sums(q, rows.map(lambda t, low=low: t[low : low + 6]), 7, Key(1)) for low in range(0, 20, 6)]
    for name in Expected._fields:
        torch.testing.assert_close(getattr(whole, name), sum(getattr(part, name) for part in parts))
    assert float(whole.count) == pytest.approx(len(x) if weights is None else float(weights.sum()))


@pytest.mark.parametrize("outputs", [(), (1,), (3,), (2, 2)], ids=str)
def test_closed_form_sums_are_those_of_many_draws(outputs):
    size = max(1, torch.Size(outputs).numel())
    net = torch.nn.Sequential(torch.nn.Linear(3, size).double(), torch.nn.Unflatten(1, outputs or (1,)))
    if not outputs:
        net.append(torch.nn.Flatten(0))
    x = numbers(FLOAT64)[0]
    y = Key(4).normal((len(x), *outputs), FLOAT64)
    joint = po.Joint(net, po.likelihoods.Gaussian(0.8), po.priors.Normal(1.0), num_data=len(x))
    q, _ = po.infer(Laplace(tuning=None), joint, (x, y), start=joint.initial())
    rows = po.as_data((x, y)).first()
    exact, drawn = (expected_sums(of, rows, 4000, Key(0)) for of in (q, q.gaussian))
    assert exact.squares.shape == drawn.squares.shape == (size,)
    error = float(drawn.log_likelihood.std()) / 4000**0.5
    assert abs(float(drawn.log_likelihood.mean() - exact.log_likelihood[0])) < 5 * error
    # log p(D | w) = constant - squares / (2 scale^2)
    assert abs(float((drawn.squares - exact.squares).sum())) < 5 * error * 2 * 0.8**2


def test_samples_expect_what_their_draws_say():
    joint, data = linear_regression(FLOAT64), numbers(FLOAT64)
    theta = Key(0).normal((2, 5, joint.size), FLOAT64)
    q = po.posteriors.Samples(joint, theta)
    found = expected_sums(q, po.as_data(data).first(), 32, Key(0))
    away = data[1] - joint.outputs(theta.flatten(0, 1), data[0])
    torch.testing.assert_close(found.squares, away.square().sum(1).mean(0))
    assert found.log_likelihood.shape == (10,)
    moved = dataclasses.replace(joint, likelihood=po.likelihoods.Gaussian(0.3, learn=True))
    noisy = po.posteriors.Samples(moved, torch.cat([theta, torch.zeros_like(theta[..., :1])], -1))
    torch.testing.assert_close(expected_sums(noisy, po.as_data(data).first(), 32, Key(0)).squares, found.squares)
