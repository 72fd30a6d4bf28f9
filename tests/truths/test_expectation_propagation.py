"""Expectation propagation against gold numbers, quadrature over the weights, Laplace and the best Gaussian by KL."""

import math

import pytest
import torch
from goldcases import load
from torch import Tensor, nn

import posterity as po
from posterity.likelihoods import Bernoulli, Gaussian, Likelihood, Poisson, Probit, StudentT
from posterity.methods import MAP, Conjugate, ExpectationPropagation, Laplace
from posterity.model import Joint, Tempering
from posterity.numerics import Key
from posterity.posteriors import Posterior
from posterity.priors import Normal

FLOAT64 = torch.float64
ROWS = 20
Moments = tuple[Tensor, Tensor, float]


def regression(likelihood: Likelihood, weights: int, seed: int, scale: float = 1.0) -> tuple[Joint, Tensor, Tensor]:
    """Weights and inputs from N(0, 1), targets from the likelihood."""
    key = Key(seed).fold(type(likelihood).__name__).fold(weights)
    x = key.fold("inputs").normal((ROWS, weights), FLOAT64, "cpu")
    y = likelihood.sample(x @ key.fold("weights").normal((weights, 1), FLOAT64, "cpu"), key.fold("targets"))
    joint = Joint(nn.Linear(weights, 1, bias=False).double(), likelihood, Normal(scale), ROWS)
    return joint, torch.as_tensor(x), torch.as_tensor(y)  # the same on every device


def propagated(joint: Joint, x: Tensor, y: Tensor, **settings: object) -> Moments:
    return moments(po.infer(ExpectationPropagation(**settings), joint, (x, y))[0])


def moments(q: Posterior) -> Moments:
    gaussian = q.as_gaussian()
    return gaussian.mean, gaussian.precision.covariance(), float(gaussian.log_evidence)


def by_quadrature(joint: Joint, x: Tensor, y: Tensor, near: Moments) -> Moments:
    """The trapezoid rule over the weights, along the axes of a Gaussian near the posterior."""
    size, root = len(near[0]), torch.linalg.cholesky(near[1])
    reach, points = {1: (40.0, 8001), 2: (14.0, 121), 3: (9.0, 41)}[size]  # tails are as long as the prior's
    axis = torch.linspace(-reach, reach, points, dtype=FLOAT64)
    theta = near[0] + torch.cartesian_prod(*[axis] * size).reshape(-1, size) @ root.mT
    log = joint.likelihood.log_prob((theta @ x.mT).unsqueeze(-1), y).sum(-1) + joint.bound_prior.log_prob(theta)
    mass = (log - log.max()).exp()
    mean = mass @ theta / mass.sum()
    covariance = ((theta - mean) * mass[:, None]).mT @ (theta - mean) / mass.sum()
    cell = size * math.log(float(axis[1] - axis[0])) + float(root.diagonal().log().sum())
    return mean, covariance, float(log.max() + mass.sum().log()) + cell


def errors(found: Moments, exact: Moments) -> list[float]:
    """Of mean and covariance in units of the exact covariance, and of the log evidence."""
    root = torch.linalg.cholesky(exact[1])
    mean = torch.linalg.solve_triangular(root, (found[0] - exact[0])[:, None], upper=False)
    half = torch.linalg.solve_triangular(root, found[1] - exact[1], upper=False)
    covariance = torch.linalg.solve_triangular(root, half.mT, upper=False)
    return [float(mean.norm()), float(covariance.norm()), abs(found[2] - exact[2])]


def best_by_kl(joint: Joint, x: Tensor, y: Tensor, near: Moments) -> Moments:
    """Mean, covariance and ELBO of the Gaussian of the largest ELBO, which `FullRank` looks for; prior N(0, 1)."""
    size = len(near[0])
    node = torch.linspace(-7.0, 7.0, 41, dtype=FLOAT64)[:, None]
    weight = torch.softmax(-0.5 * node.square(), 0)
    rows, columns = torch.tril_indices(size, size)
    factor = torch.linalg.cholesky(near[1])
    values = torch.cat([near[0], factor[rows, columns]]).requires_grad_()
    optimizer = torch.optim.LBFGS([values], max_iter=100, tolerance_grad=1e-8, line_search_fn="strong_wolfe")

    def elbo() -> tuple[Tensor, Tensor]:
        mean, root = values[:size], torch.zeros(size, size, dtype=FLOAT64).index_put((rows, columns), values[size:])
        outputs = x @ mean + (x @ root).norm(dim=1) * node
        fit = (weight * joint.likelihood.log_prob(outputs.unsqueeze(-1), y)).sum()
        divergence = 0.5 * (root.square().sum() + mean.square().sum() - size) - root.diagonal().log().sum()
        return fit - divergence, root

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = -elbo()[0]
        loss.backward()
        return loss

    optimizer.step(closure)
    bound, root = elbo()
    return values[:size].detach(), (root @ root.mT).detach(), float(bound.detach())


@pytest.mark.parametrize("settings", [{}, {"order": "sequential"}, {"damping": 0.4}], ids=str)
def test_gold_probit_regression(settings: dict[str, object]) -> None:
    case = load("ep_probit")
    joint = Joint(nn.Linear(2, 1, bias=False).double(), Probit(), Normal(case.inputs["prior_std"]), 10)
    q, trace = po.infer(ExpectationPropagation(**settings), joint, (case.inputs["X"], case.inputs["t"]))
    case.check("ep_mean", q.point())
    case.check("ep_cov", q.gaussian.precision.covariance())
    case.check("ep_log_evidence", q.log_evidence)
    case.check("ep_predictive", q.predict(case.inputs["X_test"]).probs[:, 1])
    assert float(trace["distance"][-1]) <= 1e-9
    exact = by_quadrature(joint, case.inputs["X"], case.inputs["t"].unsqueeze(-1), moments(q))
    for name, value in zip(("exact_mean", "exact_cov", "exact_log_evidence"), exact, strict=True):
        case.check(name, value)


@pytest.mark.parametrize("likelihood", [Bernoulli(), Probit()], ids=str)
def test_closer_than_laplace_and_variational_inference_on_nine_of_ten(likelihood: Likelihood) -> None:
    wins = []
    for seed in range(10):
        joint, x, y = regression(likelihood, 2, seed)
        own = propagated(joint, x, y)
        exact = by_quadrature(joint, x, y, own)
        mode, _ = po.infer(MAP(), joint, (x, y))
        laplace = moments(po.infer(Laplace(tuning=None), joint, (x, y), start=mode)[0])
        others = [errors(other, exact) for other in (laplace, best_by_kl(joint, x, y, own))]
        wins.append([[mine < its for mine, its in zip(errors(own, exact), other, strict=True)] for other in others])
    assert bool((torch.tensor(wins).sum(0) >= 9).all()), torch.tensor(wins).sum(0)


@pytest.mark.parametrize("weights", [1, 2, 3])
@pytest.mark.parametrize("likelihood", [Bernoulli(), Probit(), Poisson()], ids=str)
def test_near_the_posterior_by_quadrature(likelihood: Likelihood, weights: int) -> None:
    joint, x, y = regression(likelihood, weights, 3)
    own = propagated(joint, x, y)
    mean, covariance, evidence = errors(own, by_quadrature(joint, x, y, own))
    assert mean <= 0.02
    assert covariance <= 0.15
    assert evidence <= 0.03


def test_one_row_is_exact() -> None:
    """The only tilted distribution is the posterior itself."""
    for likelihood in (Bernoulli(), Probit(), Poisson(), StudentT(3.0, 0.5)):
        joint, x, y = regression(likelihood, 1, 0)
        joint = Joint(nn.Linear(1, 1, bias=False).double(), likelihood, Normal(2.0), 1)
        own = propagated(joint, x[:1], y[:1])
        exact = by_quadrature(joint, x[:1], y[:1], own)
        assert errors(own, exact) == pytest.approx([0.0, 0.0, 0.0], abs=1e-9)


@pytest.mark.parametrize("tempering", [Tempering.bayes(), Tempering.tempered(0.4), Tempering.cold(0.5)], ids=str)
@pytest.mark.parametrize("order", ["parallel", "sequential"])
def test_gaussian_noise_is_exact_after_one_sweep(tempering: Tempering, order: str) -> None:
    x = Key(1).normal((30, 4), FLOAT64)
    y = x.sum(-1, keepdim=True) + 5.0 + 0.3 * Key(2).normal((30, 1), FLOAT64)
    weights = torch.linspace(0.0, 2.0, 30, dtype=FLOAT64)
    joint = Joint(nn.Linear(4, 1).double(), Gaussian(0.3), Normal(0.7, mean=0.5), 30, tempering)
    q, trace = po.infer(ExpectationPropagation(order=order), joint, (x, y, weights))
    exact, _ = po.infer(Conjugate(), joint, (x, y, weights))
    assert len(trace["distance"]) == 1
    torch.testing.assert_close(q.point(), exact.point(), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(q.gaussian.precision.matrix, exact.gaussian.precision.matrix, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(q.log_evidence, exact.log_evidence, rtol=1e-10, atol=1e-10)
