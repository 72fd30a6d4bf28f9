"""The log evidence by weighted draws: against exact evidences, integration on grids, and tails that are known."""

import dataclasses
import logging
import math

import numpy as np
import pytest
import torch
from contracts.cases import classification, labels, linear_regression, numbers
from goldcases import load
from scipy import stats
from torch import nn

import posterity as po
from posterity.errors import BadData
from posterity.evidence import Importance, importance, prior_monte_carlo
from posterity.evidence.importance import pareto_smoothed
from posterity.likelihoods import Bernoulli, Gaussian
from posterity.methods import MAP, Conjugate, Laplace
from posterity.numerics import Key
from posterity.posteriors import Gaussian as Normally
from posterity.posteriors import Mixture
from posterity.precisions import Dense, Diagonal
from posterity.priors import Normal, StudentT

FLOAT64 = torch.float64


def close(value, expected, standard_error):
    assert 0 < standard_error < 0.2
    assert abs(value - expected) < 5 * standard_error


def widened(q, factor):
    """The same mean, with a covariance that many times as large."""
    return Normally(q.joint, q.point(), Dense(torch.linalg.inv(factor * q.gaussian.precision.covariance())))


@pytest.fixture(scope="module")
def exact():
    return po.infer(Conjugate(), linear_regression(FLOAT64), numbers(FLOAT64))[0]


def test_equal_weights_from_the_exact_posterior(exact):
    of = importance(exact, numbers(FLOAT64))
    assert of.log_evidence == pytest.approx(float(exact.log_evidence), abs=1e-8)
    assert of.smoothed_log_evidence == pytest.approx(of.log_evidence, abs=1e-8)
    assert of.standard_error < 1e-9
    assert of.pareto_k == -math.inf
    assert of.effective_draws == pytest.approx(of.draws)


@pytest.mark.parametrize("random", ["*", "*.weight"])
@pytest.mark.parametrize("tempering", [po.Tempering.bayes(), po.Tempering.tempered(0.4), po.Tempering.cold(0.4)])
def test_a_wide_proposal_finds_the_exact_evidence(tempering, random):
    joint = dataclasses.replace(linear_regression(FLOAT64), tempering=tempering, random=random)
    q, _ = po.infer(Conjugate(), joint, numbers(FLOAT64))
    of = importance(widened(q, 2.0), numbers(FLOAT64), draws=4000)
    close(of.log_evidence, float(q.log_evidence), of.standard_error)
    close(of.smoothed_log_evidence, float(q.log_evidence), of.smoothed_standard_error)
    assert of.reliable
    assert 500 < of.effective_draws < 4000


def test_a_narrow_proposal_is_flagged(exact, caplog):
    with caplog.at_level(logging.WARNING, logger="posterity"):
        good = importance(widened(exact, 1.5), numbers(FLOAT64))
        assert not caplog.records
        bad = importance(widened(exact, 0.05), numbers(FLOAT64))
    assert good.pareto_k < 0.5
    assert bad.pareto_k > 0.7
    assert not bad.reliable
    (record,) = caplog.records
    assert f"k-hat of {bad.pareto_k:.2f}, above 0.67" in record.message
    assert "Draw more, or take a wider posterior" in record.message
    assert bad.log_evidence < float(exact.log_evidence) - 0.5  # as the warning says


def test_the_prior_as_proposal():
    case = load("tiny_bnn_elbo")

    class Tiny(nn.Module):
        def __init__(self):
            super().__init__()
            self.weights = nn.Parameter(torch.zeros(2, dtype=FLOAT64))

        def forward(self, x):
            return self.weights[1] * torch.tanh(self.weights[0] * x)

    joint = po.Joint(Tiny(), Gaussian(case.inputs["beta"] ** -0.5), Normal(case.inputs["alpha"] ** -0.5), 4)
    rows = case.inputs["x"].unsqueeze(1), case.inputs["y"].unsqueeze(1)
    of = prior_monte_carlo(joint, rows, draws=20_000)
    close(of.log_evidence, case.at("log_evidence"), of.standard_error)
    close(of.smoothed_log_evidence, case.at("log_evidence"), of.smoothed_standard_error)
    q = Normally(joint, torch.zeros(2, dtype=FLOAT64), Diagonal(torch.ones(2) / 1.44))
    wide = importance(q, rows, draws=20_000)
    close(wide.log_evidence, case.at("log_evidence"), wide.standard_error)


@pytest.mark.parametrize("tempering", [po.Tempering.bayes(), po.Tempering.tempered(3.0), po.Tempering.cold(2.0)])
@pytest.mark.parametrize("prior", [Normal(1.5), StudentT(3.0, 1.0)], ids=["normal", "student"])
def test_against_integration_over_two_weights(prior, tempering):
    x = Key(0).normal((15, 2), FLOAT64)
    y = (x.sum(1, keepdim=True) + Key(1).normal((15, 1), FLOAT64) > 0).to(FLOAT64)
    joint = po.Joint(nn.Linear(2, 1, bias=False, dtype=FLOAT64), Bernoulli(), prior, 15, tempering)
    axis = torch.linspace(-30, 30, 601, dtype=FLOAT64)
    grid = torch.cartesian_prod(axis, axis)
    values = tempering.likelihood_power * joint.likelihood.log_prob((grid @ x.T).unsqueeze(-1), y).sum(-1)
    values = values + tempering.prior_power * joint.prior.log_prob(grid)
    expected = float(values.logsumexp(0)) + 2 * math.log(0.1)
    naive = prior_monte_carlo(joint, (x, y), draws=20_000)
    close(naive.smoothed_log_evidence, expected, naive.smoothed_standard_error)
    q, _ = po.infer(MAP(steps=500, batch_size=None), joint, (x, y))
    q, _ = po.infer(Laplace(tuning=None), joint, (x, y), start=q)
    # Three times the covariance is not enough under the heavy tails of a tempered Student t: k-hat is 2 there.
    of = importance(widened(q, 10.0), (x, y), draws=20_000)
    assert of.reliable
    close(of.smoothed_log_evidence, expected, of.smoothed_standard_error)


def test_the_standard_error_is_that_of_many_estimates(exact):
    many = [importance(widened(exact, 1.5), numbers(FLOAT64), draws=200, seed=seed) for seed in range(200)]
    seen = torch.tensor([of.log_evidence for of in many]).std()
    assert sum(of.standard_error for of in many) / 200 == pytest.approx(float(seen), rel=5 / math.sqrt(400))


@pytest.mark.parametrize("k", [0.2, 0.5, 0.9])
def test_k_hat_of_weights_with_a_known_tail(k):
    weights = stats.genpareto(k).rvs(20_000, random_state=np.random.default_rng(5)) + 1.0
    found = pareto_smoothed(torch.from_numpy(np.log(weights)))
    tail = math.ceil(3 * math.sqrt(20_000))
    assert abs(found.pareto_k - (tail * k + 5) / (tail + 10)) < 5 * (1 + k) / math.sqrt(tail)


@pytest.mark.parametrize(("draws", "tail"), [(100, 20), (1000, 95)])  # a fifth, 3 sqrt(1000) = 94.9
def test_smoothing_changes_the_largest_only_and_keeps_their_order(draws, tail):
    logs = torch.from_numpy(np.log(stats.genpareto(0.8).rvs(draws, random_state=np.random.default_rng(2))))
    found = pareto_smoothed(logs).log_weights
    order = logs.argsort()
    kept, moved = order[:-tail], order[-tail:]
    assert torch.equal(found[kept], logs[kept])
    assert bool((found[moved[:-1]] != logs[moved[:-1]]).all())  # the last is never raised
    assert bool((found[moved].diff() >= 0).all())
    assert float(found.max()) <= float(logs.max())
    shifted = pareto_smoothed(logs + 700.0)
    torch.testing.assert_close(shifted.log_weights - 700.0, found, rtol=0, atol=1e-9)


@pytest.mark.parametrize("spread", [1e3, 1e6])
def test_weights_of_which_one_is_all(spread):
    found = pareto_smoothed(spread * Key(4).normal((100,), FLOAT64))
    assert found.pareto_k > 5
    assert not bool(found.log_weights.isnan().any())


def test_draws_of_no_likelihood_weigh_nothing():
    found = Importance(torch.cat([torch.zeros(100), torch.full((300,), -math.inf)]).to(FLOAT64))
    assert found.log_evidence == pytest.approx(-math.log(4))
    assert found.standard_error == pytest.approx(math.sqrt(3 / 399), rel=1e-6)


def test_seeds_float32_and_loaders():
    joint, rows = classification(torch.float32), labels(torch.float32)
    q = Normally(joint, joint.initial(), Diagonal(torch.full((joint.size,), 4.0)))
    of = importance(q, rows, draws=200, seed=1)
    assert torch.equal(of.log_weights, importance(q, rows, draws=200, seed=1).log_weights)
    assert not torch.equal(of.log_weights, importance(q, rows, draws=200, seed=2).log_weights)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*rows), batch_size=6)
    torch.testing.assert_close(importance(q, loader, draws=200, seed=1).log_weights, of.log_weights, rtol=0, atol=1e-4)
    prior = prior_monte_carlo(joint, rows, draws=200, seed=1)
    assert torch.equal(prior.log_weights, prior_monte_carlo(joint, rows, draws=200, seed=1).log_weights)


def test_doors(exact):
    joint, rows = classification(FLOAT64), labels(FLOAT64)
    with pytest.raises(ValueError, match="at least 25"):
        importance(exact, numbers(FLOAT64), draws=24)
    with pytest.raises(BadData, match="num_data is 20 but the data have 5 rows"):
        prior_monte_carlo(joint, tuple(tensor[:5] for tensor in rows))
    with pytest.raises(TypeError, match="Point has no density"):
        importance(po.infer(MAP(steps=1), joint, rows)[0], rows)
    with pytest.raises(TypeError, match="2 separate posteriors"):
        importance(Normally(joint, joint.initial().expand(2, -1), Diagonal(torch.ones(2, joint.size))), rows)
    with pytest.raises(ValueError, match="a prior over all of theta"):
        prior_monte_carlo(dataclasses.replace(joint, random="*.weight"), rows)
    with pytest.raises(TypeError, match="needs a Joint"):
        prior_monte_carlo(po.Density(lambda w: -w.square().sum(), {"w": (2,)}), None)
    broken = Normally(joint, torch.full((joint.size,), math.nan, dtype=FLOAT64), Diagonal(torch.ones(joint.size)))
    with pytest.raises(FloatingPointError, match="1000 NaN"):
        importance(broken, rows)


def test_a_mixture_over_equal_problems_has_the_evidence_of_one():
    """Its components were fitted to joints of their own, with priors that are equal but not one object."""
    rows = numbers(FLOAT64)
    parts = [po.infer(Conjugate(), linear_regression(FLOAT64), rows)[0] for _ in range(2)]
    assert parts[0].joint.prior is not parts[1].joint.prior
    of = importance(Mixture(parts), rows, draws=100)
    assert of.log_evidence == pytest.approx(float(parts[0].log_evidence), abs=1e-8)
