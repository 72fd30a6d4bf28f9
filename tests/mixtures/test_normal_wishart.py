"""The conjugate half of a Bayesian mixture against gold numbers, textbook densities and draws."""

import math

import numpy as np
import pytest
import torch
from beliefcases import FAMILIES, drawn, log_normals, naive_sums, problem
from goldcases import load
from scipy import integrate, stats

from posterity.mixtures import beliefs as conjugate
from posterity.mixtures import passes
from posterity.mixtures.beliefs import Beliefs, bound, components, divergence, sums_of, updated
from posterity.mixtures.sweeps import Rows
from posterity.numerics.random import Key

kinds = pytest.mark.parametrize("kind", list(FAMILIES))


def test_three_sweeps_and_the_limit_are_gold():
    case = load("bayesian_gmm_vb")
    given = case.inputs
    number = lambda value: torch.full((1, 1), value, dtype=torch.float64)  # noqa: E731
    prior = Beliefs(
        number(given["alpha0"]).expand(1, 2),
        number(given["beta0"]),
        given["m0"][None, None],
        torch.linalg.inv(given["W0"])[None, None],
        number(given["nu0"]),
    )
    full = FAMILIES["full"]
    rows = Rows(given["X"], None, None, torch.zeros(2, dtype=torch.float64))
    sums = naive_sums("full", given["X"], torch.ones(9, dtype=torch.float64), given["R0"])
    for sweep in range(200):
        beliefs = updated(full, prior, sums)
        made = components(full, beliefs)
        if sweep < 3:
            path = f"sweeps.{sweep}."
            case.check(path + "elbo_after_m_step", bound(full, prior, beliefs, sums)[0])
            case.check(path + "alpha", beliefs.concentration[0])
            case.check(path + "beta", beliefs.mean_precision[0])
            case.check(path + "m", beliefs.means[0])
            case.check(path + "W", torch.linalg.inv(beliefs.inverse_scales[0]))
            case.check(path + "nu", beliefs.degrees[0])
            responsibilities = passes.responsibilities(rows, full.kind, made)[0]
            case.check(path + "responsibilities_after_e_step", responsibilities)
        sums = sums_of(full, beliefs.means, passes.statistics(rows, full.kind, made))
    final = bound(full, prior, beliefs, sums)[0]
    case.check("limit.elbo", final)
    case.check("limit.responsibilities", passes.responsibilities(rows, full.kind, made)[0])
    assert final < case.at("exact_log_evidence")


@pytest.mark.parametrize(("size", "degrees"), [(1, 0.4), (2, 1.5), (4, 9.0)])
def test_wishart_numbers_are_those_of_scipy(size, degrees):
    rng = np.random.default_rng(size)
    root = rng.normal(size=(size, size))
    scale = root @ root.T + np.eye(size)
    point = np.linalg.inv(scale)
    log_det = torch.tensor(np.linalg.slogdet(degrees * scale)[1], dtype=torch.float64)
    found = conjugate.log_normaliser(log_det, torch.tensor(degrees, dtype=torch.float64), size)
    kernel = (degrees - size - 1) / 2 * np.linalg.slogdet(point)[1] - np.trace(point @ point) / 2
    if degrees >= size:  # scipy refuses fewer
        assert float(found) + kernel == pytest.approx(stats.wishart.logpdf(point, degrees, scale), rel=1e-12)
    step = 1e-5  # E log|Lambda| / 2 is the derivative of -log B in nu at fixed W
    ends = [
        conjugate.log_normaliser(
            torch.tensor(np.linalg.slogdet(nu * scale)[1], dtype=torch.float64),
            torch.tensor(nu, dtype=torch.float64),
            size,
        )
        for nu in (degrees - step, degrees + step)
    ]
    expected = conjugate.expected_log_det(log_det, torch.tensor(degrees, dtype=torch.float64), size)
    assert float(expected) / 2 == pytest.approx(float(ends[0] - ends[1]) / (2 * step), rel=1e-6)


def test_dirichlet_divergence_is_that_of_torch():
    concentrations = torch.tensor([[0.3, 2.0, 40.0]], dtype=torch.float64)
    prior = torch.tensor([[0.5, 0.5, 0.5]], dtype=torch.float64)
    truth = torch.distributions.kl_divergence(
        torch.distributions.Dirichlet(concentrations), torch.distributions.Dirichlet(prior)
    )
    torch.testing.assert_close(conjugate.Dirichlet().divergence(concentrations, prior), truth, rtol=1e-12, atol=0.0)


@kinds
def test_bound_is_the_expected_log_joint_less_log_q(kind):
    """E_q [log p(X, Z, theta) - log q(Z) - log q(theta)] by draws of theta, with all densities from scipy."""
    given = problem(kind)
    beliefs = given.beliefs._replace(means=given.beliefs.means + 0.1)  # not only where an M-step ends
    count = 4000
    draws = drawn(kind, beliefs, given.prior, count, seed=3)
    points = given.rows.points.cpu().numpy()
    logs = np.log(draws.weights)[:, None] + log_normals(
        points[None, :, None], draws.means[:, None], draws.precisions[:, None]
    )  # (S, N, K)
    shares = given.responsibilities[0].cpu().numpy()
    rows = ((logs - np.log(shares)) * shares).sum(-1) @ given.rows.weights.cpu().numpy()
    terms = rows + draws.log_prior - draws.log_density
    error = terms.std(ddof=1) / math.sqrt(count)
    found = float(bound(given.family, given.prior, beliefs, given.sums))
    assert abs(found - terms.mean()) < 5 * error
    assert error < 0.1


@kinds
def test_update_is_the_maximum_of_the_bound(kind):
    given = problem(kind, seed=1)
    top = float(bound(given.family, given.prior, given.beliefs, given.sums))
    for name in Beliefs._fields:
        value = getattr(given.beliefs, name)
        for trial in range(5):
            factor = torch.exp(0.05 * Key(trial).fold(name).normal(value.shape, torch.float64))
            if name == "inverse_scales" and value.dim() > 2 and kind in ("full", "tied", "sticks"):
                factor = torch.exp(0.05 * Key(trial).fold(name).normal((1,), torch.float64))  # stays definite
            if kind == "sticks" and name == "concentration":
                factor = torch.cat([factor[:, :-1], torch.ones_like(factor[:, -1:])], 1)  # the last is not in use
            moved = given.beliefs._replace(**{name: value * factor})
            assert float(bound(given.family, given.prior, moved, given.sums)) < top


@kinds
def test_bound_touches_at_the_responsibilities_of_the_scores(kind):
    """After an E-step the bound is the sum of log-sum-exp of scores less the divergence from the prior."""
    given = problem(kind, seed=2)
    made = components(given.family, given.beliefs)
    found = passes.statistics(given.rows, given.family.kind, made)
    sums = sums_of(given.family, given.beliefs.means, found)
    short = found.log_likelihood - divergence(given.family, given.prior, given.beliefs, made.factors)
    whole = bound(given.family, given.prior, given.beliefs, sums)
    torch.testing.assert_close(whole, short, rtol=1e-12, atol=1e-10)
    assert bool(whole > bound(given.family, given.prior, given.beliefs, given.sums))


@kinds
def test_divergence_of_a_prior_from_itself_is_nought(kind):
    given = problem(kind)
    same = given.prior._replace(
        mean_precision=given.prior.mean_precision.expand(1, 3), means=given.prior.means.expand(1, 3, 2)
    )
    if kind != "tied":
        shape = given.family.kind.shape(3, 2)
        same = same._replace(
            inverse_scales=given.prior.inverse_scales.expand(1, *shape), degrees=given.prior.degrees.expand(1, 3)
        )
    factors = components(given.family, same).factors
    assert float(divergence(given.family, given.prior, same, factors)) == pytest.approx(0.0, abs=1e-12)


@kinds
def test_prediction_is_the_average_density_over_draws(kind):
    given = problem(kind)
    count = 8_000
    draws = drawn(kind, given.beliefs, given.prior, count, seed=4)
    points = torch.tensor([[0.0, 0.0], [1.0, -2.0], [-3.0, 0.5]], dtype=torch.float64)
    densities = np.exp(
        log_normals(points.cpu().numpy()[None, :, None], draws.means[:, None], draws.precisions[:, None])
    )
    mixed = (densities * draws.weights[:, None]).sum(-1)  # (S, 3)
    error = mixed.std(0, ddof=1) / math.sqrt(count)
    found = conjugate.log_joint(given.family, given.beliefs, points, given.rows.centre).exp().sum(-1).cpu().numpy()
    assert np.all(np.abs(found - mixed.mean(0)) < 5 * error)
    assert np.all(error < 0.05 * found)


def predicted(given, chosen, key):
    """Draws of new rows from the components chosen."""
    roots = torch.linalg.cholesky(conjugate.scale_matrices(given.family, given.beliefs))[chosen]
    noise = conjugate.noise(given.family, given.beliefs, chosen, key)
    return given.beliefs.means[0, chosen] + (roots @ noise[..., None])[..., 0]


@kinds
def test_prediction_integrates_to_one_and_draws_follow_it(kind):
    given = problem(kind, dimensions=1, seed=5)

    def density(x):
        point = torch.tensor([[x]], dtype=torch.float64)
        return float(conjugate.log_joint(given.family, given.beliefs, point, given.rows.centre).exp().sum())

    mass, _ = integrate.quad(density, -np.inf, np.inf, limit=200)
    assert mass == pytest.approx(1.0, abs=1e-6)
    below, _ = integrate.quad(density, -np.inf, 0.5, limit=200)
    rows = predicted(given, torch.arange(20_000) % 3, Key(0))
    weights = given.family.weights.means(given.beliefs.concentration)[0].repeat(6667)[:20_000] * 3
    terms = (rows[:, 0] < 0.5) * weights
    assert abs(float(terms.mean()) - below) < 5 * float(terms.std()) / math.sqrt(20_000)


@kinds
def test_draws_in_more_dimensions_have_the_density_of_the_prediction(kind):
    """E 1/p over a box is its volume: a check of correlations between the dimensions of a draw, within components."""
    given = problem(kind, components=1, seed=6, num_data=30)
    rows = predicted(given, torch.zeros(20_000, dtype=torch.int64), Key(1))
    inside = ((rows - given.beliefs.means[0]).abs() < 1.0).all(-1)
    terms = inside / conjugate.log_joint(given.family, given.beliefs, rows, given.rows.centre).exp().sum(-1)
    error = float(terms.std()) / math.sqrt(20_000)
    assert abs(float(terms.mean()) - 4.0) < 5 * error
    assert error < 0.2


def test_weights_of_sticks_are_averages_over_draws():
    given = problem("sticks", components=4, seed=7)
    weights = drawn("sticks", given.beliefs, given.prior, 3_000, seed=8).weights
    means = given.family.weights.means(given.beliefs.concentration)[0].cpu().numpy()
    logs = given.family.weights.expected_logs(given.beliefs.concentration)[0].cpu().numpy()
    assert means.sum() == pytest.approx(1.0, rel=1e-12)
    for found, values in ((means, weights), (logs, np.log(weights))):
        assert np.all(np.abs(found - values.mean(0)) < 5 * values.std(0) / math.sqrt(3_000))


def test_one_stick_is_the_whole():
    given = problem("sticks", components=1)
    assert given.family.weights.means(given.beliefs.concentration).tolist() == [[1.0]]
    assert given.family.weights.expected_logs(given.beliefs.concentration).tolist() == [[0.0]]
    alike = problem("full", components=1)
    both = [float(bound(each.family, each.prior, each.beliefs, each.sums)) for each in (given, alike)]
    assert both[0] == pytest.approx(both[1], rel=1e-12)
