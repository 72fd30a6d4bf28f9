"""Bayesian logistic regression: MAP, Laplace and its predictives, against gold and against the exact posterior."""

import pytest
import torch
from goldcases import load
from matrixcases import as_matrix
from torch import nn

import posterity as po
from posterity.errors import NotPositiveDefinite
from posterity.predictive import Exact, MonteCarlo, Probit, ProbitPhi


def problem(case):
    net = nn.Linear(2, 1, bias=False, dtype=torch.float64)
    prior = po.priors.Normal(scale=case.inputs["prior_std"])
    joint = po.Joint(net, po.likelihoods.Bernoulli(), prior, num_data=len(case.inputs["t"]))
    return joint, (case.inputs["X"], case.inputs["t"])


def find_map(joint, data, step_size=2.0, steps=800):
    sgd = po.optim.SGD(step_size=step_size, momentum=0.8)
    return po.infer(po.methods.MAP(steps=steps, batch_size=None, optimizer=sgd), joint, data, progress=False)[0]


@pytest.fixture(scope="module")
def binary():
    case = load("logistic_map_laplace")
    joint, data = problem(case)
    start = find_map(joint, data)
    q, _ = po.infer(
        po.methods.Laplace(tuning=None, curvature=po.curvature.Hessian()), joint, data, start=start, progress=False
    )
    return case, joint, data, start, q


def test_map_is_the_mode_with_the_prior_counted_once(binary):
    case, joint, data, start, _ = binary
    case.check("w_map", start.theta)
    value, grad, _ = joint.value_and_grad(start.theta, po.model.Batch(data[0], data[1].unsqueeze(-1)))
    assert grad.abs().max() < 1e-10
    prior_constant = -2 * torch.log(torch.tensor(2.0 * torch.pi, dtype=torch.float64).sqrt() * case.inputs["prior_std"])
    case.check("neg_log_joint_without_prior_constant", -(value - prior_constant))


def test_laplace_precision_is_the_total_hessian_with_prior(binary):
    case, *_, q = binary
    case.check("hessian", as_matrix(q.gaussian.precision))
    case.check("laplace_cov", q.gaussian.precision.covariance())
    case.check("laplace_log_evidence", q.log_evidence)


def test_gauss_newton_is_the_hessian_of_a_linear_model(binary):
    case, joint, data, start, _ = binary
    q, _ = po.infer(po.methods.Laplace(tuning=None, batch_size=4), joint, data, start=start, progress=False)
    case.check("hessian", as_matrix(q.gaussian.precision))
    case.check("laplace_log_evidence", q.log_evidence)


def test_logit_moments(binary):
    case, *_, q = binary
    mean, covariance = q.output_moments(case.inputs["X_test"])
    case.check("logit_mean", mean.squeeze(-1))
    case.check("logit_var", covariance.squeeze(-1).squeeze(-1))


@pytest.mark.parametrize(
    ("integrator", "name"), [(Exact(), "laplace_exact"), (ProbitPhi(), "probit_phi"), (Probit(), "probit_kappa")]
)
def test_predictives_of_the_laplace_posterior(binary, integrator, name):
    case, *_, q = binary
    case.check(f"predictive_{name}", q.predict(case.inputs["X_test"], integrator=integrator).probs[:, 1])


def test_plug_in_predictive_of_the_map(binary):
    case, _, _, start, _ = binary
    case.check("predictive_plugin", start.predict(case.inputs["X_test"]).probs[:, 1])


@pytest.mark.parametrize("route", ["linearised draws", "weight draws"])
def test_monte_carlo_predictives_average_probabilities(binary, route):
    case, *_, q = binary
    draws = 40_000
    if route == "linearised draws":
        pred = q.predict(case.inputs["X_test"], integrator=MonteCarlo(draws=draws), seed=5)
    else:
        pred = q.gaussian.predict(case.inputs["X_test"], draws=draws, seed=5)
    exact = case.expected["predictive_laplace_exact"]
    standard_error = (exact * (1 - exact) / draws).sqrt()  # of a Bernoulli: at least that of a probability
    assert ((pred.probs[:, 1] - exact).abs() < 5 * standard_error).all()


@pytest.mark.parametrize(
    ("integrator", "name", "tolerance"),
    [(Exact(), "exact", 1e-6), (ProbitPhi(), "phi", 1e-6), (Probit(), "kappa", 1e-6)],
)
def test_limits_along_rays(binary, integrator, name, tolerance):
    case, *_, start, q = binary
    far = case.inputs["X_test"] * 1e7
    torch.testing.assert_close(
        q.predict(far, integrator=integrator).probs[:, 1], case.expected[f"ray_limit_{name}"], rtol=0, atol=tolerance
    )
    saturated = start.predict(far).probs[:, 1]
    assert ((saturated < 1e-6) | (saturated > 1 - 1e-6)).all()


def exact_posterior(case):
    """Mean, covariance, evidence and predictive by a trapezoid grid over the two weights, from the Joint itself."""
    joint, (inputs, targets) = problem(case)
    axis = torch.linspace(-9.0, 15.0, 601, dtype=torch.float64)
    step = axis[1] - axis[0]
    grid = torch.cartesian_prod(axis, axis)  # (G, 2)
    batch = po.model.Batch(inputs, targets.unsqueeze(-1))
    log_density = joint.log_density(grid, batch)
    log_evidence = torch.logsumexp(log_density, 0) + 2 * step.log()
    weights = (log_density - torch.logsumexp(log_density, 0)).exp()
    mean = weights @ grid
    centred = grid - mean
    covariance = centred.T @ (weights[:, None] * centred)
    predictive = weights @ torch.sigmoid(grid @ case.inputs["X_test"].T)
    return mean, covariance, log_evidence, predictive


def test_quadrature_of_the_joint_is_the_exact_posterior():
    case = load("logistic_exact_posterior")
    mean, covariance, log_evidence, predictive = exact_posterior(case)
    case.check("posterior_mean", mean)
    case.check("posterior_cov", covariance)
    case.check("log_evidence", log_evidence)
    case.check("predictive", predictive)


def test_laplace_differs_from_the_exact_posterior_as_the_files_say(binary):
    laplace, *_, q = binary
    exact = load("logistic_exact_posterior")
    shift = exact.expected["posterior_mean"] - laplace.expected["w_map"]
    torch.testing.assert_close(exact.expected["posterior_mean"] - q.point(), shift, rtol=1e-6, atol=1e-8)
    assert (shift > 0.2).all()  # the exact posterior is skewed away from the mode
    gap = exact.expected["log_evidence"] - laplace.expected["laplace_log_evidence"]
    torch.testing.assert_close(exact.expected["log_evidence"] - float(q.log_evidence), gap, rtol=1e-6, atol=1e-8)
    assert 0.05 < gap < 0.1


@pytest.fixture(scope="module")
def multiclass():
    case = load("multiclass_map_laplace")
    net = nn.Linear(3, 3, bias=False, dtype=torch.float64)
    prior = po.priors.Normal(scale=case.inputs["prior_std"])
    joint = po.Joint(net, po.likelihoods.Categorical(), prior, num_data=len(case.inputs["y"]))
    data = (case.inputs["X"], case.inputs["y"].long())
    start = find_map(joint, data)
    q, _ = po.infer(
        po.methods.Laplace(tuning=None, curvature=po.curvature.Hessian()), joint, data, start=start, progress=False
    )
    return case, joint, data, start, q


def test_multiclass_map_hessian_and_evidence(multiclass):
    case, _, _, start, q = multiclass
    case.check("W_map", start.theta.view(3, 3))
    case.check("hessian", as_matrix(q.gaussian.precision))
    case.check("laplace_log_evidence", q.log_evidence)


def test_multiclass_predictives(multiclass):
    case, _, _, start, q = multiclass
    mean, covariance = q.output_moments(case.inputs["X_test"])
    probit = q.predict(case.inputs["X_test"], integrator=Probit()).probs
    plugin = start.predict(case.inputs["X_test"]).probs
    for row in range(2):
        case.check(f"predictive.{row}.logit_mean", mean[row])
        case.check(f"predictive.{row}.logit_cov", covariance[row])
        case.check(f"predictive.{row}.meanfield_probit", probit[row])
        case.check(f"predictive.{row}.plugin", plugin[row])


@pytest.mark.parametrize("prior", [po.priors.Laplace(), po.priors.GroupLasso(1.0)], ids=["laplace", "group lasso"])
@pytest.mark.parametrize("steps", [5, 200, 1500])
def test_a_flat_prior_that_leaves_the_common_shift_of_the_logits_free_is_refused(prior, steps):
    """Adding one number to all biases changes no probability: without curvature of the prior nothing holds it."""
    x = torch.linspace(-3.0, 3.0, 30, dtype=torch.float64).unsqueeze(1)
    y = (x.squeeze(1) > -1).long() + (x.squeeze(1) > 1).long()
    net = nn.Linear(1, 3).double()
    joint = po.Joint(net, po.likelihoods.Categorical(), prior, num_data=30)
    start, _ = po.infer(po.methods.MAP(steps=steps, batch_size=None), joint, (x, y), progress=False)
    with pytest.raises(NotPositiveDefinite):
        po.infer(po.methods.Laplace(tuning=None), joint, (x, y), start=start, progress=False)
