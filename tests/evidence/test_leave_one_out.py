"""Leave-one-out cross-validation from draws: against closed forms and ArviZ."""

import math

import numpy as np
import pytest
import torch
from contracts.cases import linear_regression, numbers

import posterity as po
from posterity.evidence import leave_one_out
from posterity.likelihoods import Gaussian
from posterity.methods import MAP, Conjugate
from posterity.posteriors import Samples

FLOAT64 = torch.float64


def exact_draws(draws=4000, chains=4):
    """Independent draws of a linear regression's exact posterior, with the regression and its rows."""
    narrow, rows = linear_regression(FLOAT64), numbers(FLOAT64)
    joint = po.Joint(narrow.network, Gaussian(2.0), narrow.prior, narrow.num_data)  # so wide that no row stands out
    q, _ = po.infer(Conjugate(), joint, rows)
    theta = q.sample(chains * draws, po.Key(7)).reshape(chains, draws, -1)
    return Samples(joint, theta), joint, rows


def test_the_terms_are_those_of_fits_without_each_row():
    samples, joint, (x, y) = exact_draws()
    found = leave_one_out(samples, (x, y))
    truth = []
    for left_out in range(len(y)):
        others = torch.arange(len(y)) != left_out
        less = po.Joint(joint.network, joint.likelihood, joint.prior, len(y) - 1)
        q, _ = po.infer(Conjugate(), less, (x[others], y[others]))
        truth.append(q.predict(x[left_out : left_out + 1]).log_prob(y[left_out : left_out + 1]))
    truth = torch.cat(truth).cpu()
    logs = samples.log_likelihoods((x, y)).flatten(0, 1)  # (S, N)
    weights = (-logs).softmax(0)
    moved = weights * (logs.exp() / truth.exp() - 1.0)  # the delta method for a ratio of means
    error = moved.square().sum(0).sqrt()
    assert bool(((found.pointwise - truth).abs() < 5.0 * error).all())
    assert float(error.max()) < 0.02
    assert found.elpd == pytest.approx(float(found.pointwise.sum()))
    assert found.standard_error == pytest.approx(math.sqrt(len(y)) * float(np.std(found.pointwise.numpy())))
    full, _ = po.infer(Conjugate(), joint, (x, y))
    assert found.in_sample.sum() == pytest.approx(float(full.predict(x).log_prob(y).sum()), abs=0.02)
    assert 0.1 < found.effective_parameters < 4.0  # there are four weights
    assert not len(found.unreliable)
    told = f"elpd {found.elpd:.2f} with standard error {found.standard_error:.2f}, effective parameters "
    assert str(found) == f"{told}{found.effective_parameters:.2f}, 0 of {len(y)} rows with a k-hat above 0.70."


@pytest.mark.parametrize("efficiency", [1.0, 0.25])
def test_arviz_says_the_same(efficiency):
    arviz = pytest.importorskip("arviz")
    samples, _, rows = exact_draws(400)  # 3 sqrt(S / r) is whole: ArviZ 0 rounds it up, ArviZ 1 down
    found = leave_one_out(samples, rows, efficiency=efficiency)
    tree = samples.to_inference_data(rows, log_likelihood=True)
    other = arviz.loo(tree, pointwise=True, reff=efficiency)
    name = "loo_i" if hasattr(other, "loo_i") else "elpd_i"
    np.testing.assert_allclose(found.pointwise.numpy(), np.asarray(getattr(other, name)).ravel(), rtol=1e-6)
    np.testing.assert_allclose(found.pareto_k.numpy(), np.asarray(other.pareto_k).ravel(), rtol=1e-6)
    assert found.threshold == pytest.approx(float(other.good_k))
    elpd, effective = (other.elpd_loo, other.p_loo) if name == "loo_i" else (other.elpd, other.p)
    assert found.elpd == pytest.approx(float(elpd), rel=1e-8)
    assert found.effective_parameters == pytest.approx(float(effective), rel=1e-6)


def test_a_row_that_nothing_else_tells_of_is_named(caplog):
    joint = linear_regression(FLOAT64)
    x, y = numbers(FLOAT64)
    x, y = x.clone(), y.clone()
    x[3], y[3] = 30.0, 25.0  # far out, so that the line goes through it
    q, _ = po.infer(Conjugate(), joint, (x, y))
    found = leave_one_out(Samples(joint, q.sample(1000, po.Key(1)).unsqueeze(0)), (x, y))
    assert 3 in found.unreliable.tolist()
    assert "Pareto k-hat above 0.67" in caplog.text
    assert float(found.pareto_k[3]) == float(found.pareto_k.max())


def test_what_cannot_be_left_out_is_refused():
    samples, joint, rows = exact_draws(5, 2)
    with pytest.raises(ValueError, match="25 draws or more"):
        leave_one_out(samples, rows)
    with pytest.raises(ValueError, match="efficiency must be a positive number"):
        leave_one_out(samples, rows, efficiency=0.0)
    point, _ = po.infer(MAP(steps=1), joint, rows)
    with pytest.raises(TypeError, match="needs the draws of chains"):
        leave_one_out(point, rows)
    cold = po.Joint(joint.network, joint.likelihood, joint.prior, joint.num_data, po.Tempering.cold(0.5))
    with pytest.raises(ValueError, match="untempered"):
        leave_one_out(Samples(cold, samples.theta), rows)
