"""The linear-Gaussian model: posterior, predictive and evidence in closed form, by three methods."""

import pytest
import torch
from goldcases import load
from matrixcases import as_matrix
from torch import nn

import posterity as po


def problem(case, tempering=None, prior_scale=None):
    net = nn.Linear(2, 1, bias=False, dtype=torch.float64)
    scale = case.inputs["alpha"] ** -0.5 if prior_scale is None else prior_scale
    joint = po.Joint(
        net,
        po.likelihoods.Gaussian(scale=case.inputs["beta"] ** -0.5),
        po.priors.Normal(scale=scale),
        num_data=len(case.inputs["y"]),
        tempering=tempering or po.Tempering.bayes(),
    )
    return joint, (case.inputs["X"], case.inputs["y"])


def newton_free_map(joint, data):
    """MAP by gradient descent: linear convergence to machine precision on this quadratic."""
    step_size = 0.05 * min(1.0, 1.0 / joint.tempering.likelihood_power)  # a colder posterior is more curved
    sgd = po.optim.SGD(step_size=step_size, momentum=0.8)
    return po.infer(po.methods.MAP(steps=500, batch_size=None, optimizer=sgd), joint, data, progress=False)[0]


def exact(joint, data):
    return po.infer(po.methods.Conjugate(batch_size=3), joint, data, progress=False)[0]


def laplace(curvature):
    def fit(joint, data):
        start = newton_free_map(joint, data)
        method = po.methods.Laplace(tuning=None, curvature=curvature, batch_size=3)
        return po.infer(method, joint, data, start=start, progress=False)[0]

    return fit


METHODS = {
    "conjugate": exact,
    "laplace-ggn": laplace(po.curvature.GaussNewton()),
    "laplace-hessian": laplace(po.curvature.Hessian()),
}


@pytest.mark.parametrize("name", METHODS)
def test_posterior_predictive_and_evidence_are_the_closed_form(name):
    case = load("linear_regression")
    q = METHODS[name](*problem(case))
    case.check("posterior_mean", q.point())
    case.check("posterior_precision", as_matrix(q.gaussian.precision))
    case.check("posterior_cov", q.gaussian.precision.covariance())
    case.check("log_evidence", q.log_evidence)
    pred = q.predict(case.inputs["X_test"])
    case.check("pred_mean", pred.mean.squeeze(-1))
    case.check("pred_func_var", pred.epistemic.squeeze(-1))
    case.check("pred_total_var", pred.variance.squeeze(-1))
    case.check("pred_log_density", pred.log_prob(case.inputs["y_test"]))


def test_weight_draws_predict_as_the_closed_form_within_five_standard_errors():
    case = load("linear_regression")
    q = exact(*problem(case)).gaussian
    draws = 20_000
    pred = q.predict(case.inputs["X_test"], draws=draws, seed=3)
    variance = case.expected["pred_func_var"]
    assert ((pred.mean.squeeze(-1) - case.expected["pred_mean"]).abs() < 5 * (variance / draws).sqrt()).all()
    assert ((pred.epistemic.squeeze(-1) - variance).abs() < 5 * variance * (2 / draws) ** 0.5).all()


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("row", range(4))
def test_tempered_posteriors(name, row):
    case = load("linear_tempered_posterior")
    temperature = case.expected["rows"][row]["T"]
    for kind, tempering in (("lik", po.Tempering.tempered(temperature)), ("full", po.Tempering.cold(temperature))):
        q = METHODS[name](*problem(case, tempering))
        case.check(f"rows.{row}.{kind}_mean", q.point())
        case.check(f"rows.{row}.{kind}_precision", as_matrix(q.gaussian.precision))
        case.check(f"rows.{row}.{kind}_cov", q.gaussian.precision.covariance())
        if kind == "lik":
            pred = q.predict(case.inputs["X_test"])
            case.check(f"rows.{row}.lik_pred_func_var", pred.epistemic.squeeze(-1))
            noise = torch.full_like(pred.aleatoric, 1 / case.inputs["beta"])  # the likelihood itself is untempered
            torch.testing.assert_close(pred.aleatoric, noise)


def test_all_temperatures_at_once_are_the_same_posteriors():
    case = load("linear_tempered_posterior")
    rows = (1, 2, 3)
    temperatures = torch.tensor([case.expected["rows"][row]["T"] for row in rows], dtype=torch.float64)
    joint, data = problem(case, po.Tempering.tempered(temperatures))
    sgd = po.optim.SGD(step_size=0.02, momentum=0.9)  # small enough for the coldest member
    start, _ = po.infer(po.methods.MAP(steps=1500, batch_size=None, optimizer=sgd), joint, data, progress=False)
    q, _ = po.infer(po.methods.Laplace(tuning=None), joint, data, start=start, progress=False)
    for member, row in enumerate(rows):
        case.check(f"rows.{row}.lik_mean", q.member(member).point())
        case.check(f"rows.{row}.lik_cov", q.member(member).gaussian.precision.covariance())


def test_chain_rule_of_the_evidence():
    """log p(y) = sum_n log p(y_n | y_1 .. y_{n-1}): the predictive and the evidence agree."""
    case = load("linear_regression")
    inputs, targets = case.inputs["X"], case.inputs["y"]
    total = 0.0
    for n in range(len(targets)):
        net = nn.Linear(2, 1, bias=False, dtype=torch.float64)
        noise, prior = (
            po.likelihoods.Gaussian(case.inputs["beta"] ** -0.5),
            po.priors.Normal(case.inputs["alpha"] ** -0.5),
        )
        if n == 0:
            variance = 1 / case.inputs["beta"] + (inputs[0] ** 2).sum() / case.inputs["alpha"]
            total += float(torch.distributions.Normal(0.0, variance.sqrt()).log_prob(targets[0]))
            continue
        joint = po.Joint(net, noise, prior, num_data=n)
        q = exact(joint, (inputs[:n], targets[:n]))
        total += float(q.predict(inputs[n : n + 1]).log_prob(targets[n : n + 1]))
    case.check("log_evidence", total)
