"""The study of logistic regression: its numbers against gold, and its figures."""

import json
import math
import warnings
from dataclasses import replace

import pytest
import torch
from goldcases import load

from posterity.model import Batch
from posterity.numerics import Key
from posterity.predictive import Exact as ExactIntegral
from posterity.predictive import Probit
from posterity_studies.logistic.comparison import claims, pooled
from posterity_studies.logistic.exact import DIRECTIONS, exact_posterior, ray_limits, ray_marginal
from posterity_studies.logistic.figures import draw
from posterity_studies.logistic.fits import GAUSSIANS, INPUTS, LABELS, PRIOR_SCALE, SAMPLERS, binary, fit
from posterity_studies.logistic.langevin import langevin_bias
from posterity_studies.logistic.multiclass import softmax_average, with_bias
from posterity_studies.logistic.settings import Settings
from posterity_studies.logistic.study import run

pytestmark = pytest.mark.cpu
FIGURES = [
    *("maps.png", "rays.png", "laplace.png", "probit.png", "evidence.png", "multiclass.png"),
    *("samples.png", "errors.png", "paths.png", "langevin.png"),
]
CHAINS, DRAWS = 40, 19


@pytest.fixture(scope="module")
def study():
    return run(Settings(chains=CHAINS, draws=DRAWS, points=9, seed=3))


@pytest.fixture(scope="module")
def regression():
    return binary()


def test_the_embedded_rows_are_those_of_the_gold_case():
    inputs = load("logistic_map_laplace").inputs
    assert torch.equal(torch.tensor(INPUTS, dtype=torch.float64), inputs["X"])
    assert torch.equal(torch.tensor(LABELS, dtype=torch.float64), inputs["t"])
    assert inputs["prior_std"] == PRIOR_SCALE


def test_the_mode_and_laplace_are_gold(study):
    case = load("logistic_map_laplace")
    case.check("w_map", study.regression.mode.theta)
    case.check("laplace_cov", study.regression.covariance)
    case.check("laplace_log_evidence", study.document()["laplace"]["log_evidence"])


def test_the_exact_posterior_is_gold(study):
    case = load("logistic_exact_posterior")
    case.check("posterior_mean", study.exact.mean)
    case.check("posterior_cov", study.exact.covariance)
    case.check("log_evidence", study.exact.log_evidence)
    case.check("predictive", study.exact.probability(case.inputs["X_test"]))


def test_the_marginal_along_a_ray_gives_the_exact_predictive(regression):
    case = load("logistic_exact_posterior")
    for x, expected in zip(case.inputs["X_test"], case.expected["predictive"], strict=True):
        result = ray_marginal(regression, x).probability(torch.ones(1, dtype=torch.float64))
        torch.testing.assert_close(result[0], expected, rtol=0, atol=1e-8)


def test_the_exact_limit_is_the_mass_of_the_half_plane(regression):
    """Opposite rays share the mass, and a sum over the weight grid gives the same share up to its step."""
    exact = exact_posterior(regression)
    for direction in DIRECTIONS:
        x = torch.tensor(direction, dtype=torch.float64)
        limit = ray_marginal(regression, x).limit
        assert limit + ray_marginal(regression, -x).limit == pytest.approx(1.0, abs=1e-9)
        side = torch.sign(exact.points @ x)
        assert float(exact.mass @ (0.5 * (1 + side))) == pytest.approx(limit, abs=2e-3)


def test_theoretical_limits_are_gold(regression):
    case = load("logistic_map_laplace")
    normal, kappa = zip(*(ray_limits(regression, x) for x in case.inputs["X_test"]), strict=True)
    case.check("ray_limit_exact", torch.tensor(normal, dtype=torch.float64))
    case.check("ray_limit_phi", torch.tensor(normal, dtype=torch.float64))
    case.check("ray_limit_kappa", torch.tensor(kappa, dtype=torch.float64))


def test_far_along_every_ray_the_probability_is_its_limit(study):
    assert len(study.rays) == 3
    for ray in study.rays:
        for name, far in ray.far.items():
            tolerance = min(5 * ray.monte_carlo_error, 1e-3) if name == "Laplace, Monte Carlo" else 1e-6
            assert far == pytest.approx(ray.limit[name], abs=tolerance), name
        assert ray.monte_carlo_error < 3e-4
        assert ray.limit["MAP"] in (0.0, 1.0)
        assert ray.limit["Laplace, exact integral"] == ray.limit["Laplace, probit Φ"]
        assert abs(ray.limit["Exact posterior"] - ray.limit["Laplace, exact integral"]) > 0.01
        assert all(values.shape == ray.distance.shape for values in ray.probability.values())


def test_entropy_far_away_is_as_theory_has_it(study):
    rounded = {name: {key: round(value, 2) for key, value in row.items()} for name, row in study.entropy.items()}
    assert rounded["Laplace, exact integral"] == {"entropy_on_the_data": 0.53, "entropy_far_away": 0.34}
    assert rounded["MAP"]["entropy_far_away"] == 0.02


def test_elbo_and_divergence_add_up_to_the_log_evidence(study):
    log_evidence = load("logistic_exact_posterior").expected["log_evidence"]
    for decomposition in study.decompositions:
        assert decomposition.divergence > 0
        assert decomposition.elbo + decomposition.divergence == pytest.approx(log_evidence, abs=1e-8)
    laplace = next(item for item in study.decompositions if item.name == "Laplace")
    log_det = float(torch.logdet(study.regression.covariance))
    assert laplace.entropy == pytest.approx(1 + math.log(2 * math.pi) + 0.5 * log_det, abs=1e-12)


def test_the_variational_optima_are_gold(study):
    case = load("logistic_variational").expected
    factorised, full = (study.fits[f"Variational, {which}"].posterior for which in ("factorised", "full"))
    torch.testing.assert_close(factorised.point(), case["meanfield"]["eta_1"]["mean"], rtol=0.02, atol=0)
    torch.testing.assert_close(
        factorised.gaussian.variance.sqrt(), case["meanfield"]["eta_1"]["std"], rtol=0.02, atol=0
    )
    torch.testing.assert_close(full.point(), case["full"]["mean"], rtol=0.02, atol=0)
    torch.testing.assert_close(full.gaussian.precision.covariance(), case["full"]["cov"], rtol=0.05, atol=0.01)
    bounds = {decomposition.name: decomposition.elbo for decomposition in study.decompositions}
    result, richer = bounds["Variational,\nfactorised"], bounds["Variational,\nfull"]
    assert result == pytest.approx(case["meanfield"]["eta_1"]["elbo_eta"], abs=1e-3)
    assert richer == pytest.approx(case["full"]["elbo"], abs=1e-3)
    assert max(bound for name, bound in bounds.items() if name.startswith(("Laplace", "Exact"))) < result < richer


def test_the_variational_predictive_is_nearer_to_the_exact_one_than_laplace(study):
    rows = {row["method"]: row for row in study.document()["methods"]}
    laplace = rows["Laplace, exact integral"]["mean_error"]
    assert rows["Variational, factorised"]["mean_error"] < laplace
    assert rows["Variational, full"]["mean_error"] < laplace
    assert rows["Expectation propagation"]["mean_error"] < laplace
    for name in GAUSSIANS:
        assert rows[name]["entropy_far_away"] > 5 * rows["MAP"]["entropy_far_away"]


def test_the_expected_log_joint_is_that_of_draws(study):
    regression = study.regression
    laplace = next(decomposition for decomposition in study.decompositions if decomposition.name == "Laplace")
    noise = torch.randn((20_000, 2), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    weights = regression.mode.theta + noise @ torch.linalg.cholesky(regression.covariance).T
    values = regression.joint.log_density(weights, Batch(regression.inputs, regression.targets.unsqueeze(-1)))
    standard_error = float(values.std() / math.sqrt(len(values)))
    assert laplace.expected_log_joint == pytest.approx(float(values.mean()), abs=5 * standard_error)


def test_the_curve_is_gold(study):
    case = load("laplace_1d")
    for name in ("mode", "precision", "laplace_log_normaliser", "exact_log_normaliser"):
        case.check(name, getattr(study.curve, name))
    u = torch.linspace(-12.0, 5.0, 20_001, dtype=torch.float64)
    for values in (study.curve.log_density(u), study.curve.laplace_log_density(u)):
        assert float(torch.trapezoid(values.exp(), u)) == pytest.approx(1.0, abs=1e-8)


def test_the_probit_error_is_gold(study):
    load("probit_approximation").check("sup_abs_phi_minus_sigmoid", study.probit.largest)


def test_three_classes_are_fitted_and_predicted_as_gold():
    case = load("multiclass_map_laplace")
    torch.testing.assert_close(case.inputs["X"], with_bias(case.inputs["X"][:, :2]))
    result = fit(case.inputs["X"], case.inputs["y"].long(), case.inputs["prior_std"], num_classes=3)
    case.check("W_map", result.mode.theta.view(3, 3))
    case.check("laplace_log_evidence", result.laplace.log_evidence)
    probs = result.laplace.predict(case.inputs["X_test"], integrator=Probit()).probs
    case.check("predictive.0.meanfield_probit", probs[0])


def test_monte_carlo_is_nearer_to_the_softmax_integral_than_mean_field_probit(study):
    errors = {row["method"]: row["mean_distance"] for row in study.document()["multiclass"]}
    assert errors["Laplace, exact integral"] == 0.0
    assert errors["Laplace, Monte Carlo"] < 0.005 < 0.02 < errors["Laplace, mean-field probit"] < errors["MAP"]
    for probs in study.multiclass.probs.values():
        torch.testing.assert_close(probs.sum(1), torch.ones(81, dtype=torch.float64))


def test_monte_carlo_maps_of_three_classes_are_smooth(study):
    """Neighbours share their draws, so their errors, of 1 / sqrt(S), differ by far less."""
    laplace = study.multiclass.regression.laplace
    axis = torch.linspace(2.0, 2.1, 11, dtype=torch.float64)
    inputs = with_bias(torch.stack([axis, -axis], dim=1))
    draws = laplace.sample(1000, Key(0))
    error = softmax_average(draws, inputs) - laplace.predict(inputs, integrator=ExactIntegral()).probs
    assert 1e-4 < float(error.abs().max()) < 5 / math.sqrt(1000)
    assert float(error.diff(dim=0).abs().max()) < 0.1 * float(error.abs().max())
    one = laplace.joint.outputs(draws[0], inputs).softmax(-1)
    torch.testing.assert_close(softmax_average(draws[:1], inputs), one)


def test_every_method_has_a_row_with_its_cost(study):
    rows = {row.method: row for row in study.comparison}
    assert list(rows) == ["Laplace", *GAUSSIANS, *SAMPLERS]
    warmup = DRAWS + 50
    single, leapfrogs = CHAINS * (warmup + 5 * DRAWS), CHAINS * 5 * (warmup + DRAWS)
    for name in ("Metropolis, short steps", "Metropolis", "Langevin", "MALA"):
        assert rows[name].gradients == single
    assert rows["HMC"].gradients == leapfrogs
    assert rows["HMC"].ess_per_1000_gradients == pytest.approx(1000 * rows["HMC"].ess / (CHAINS * 5 * DRAWS))
    assert rows["Variational, factorised"].gradients == 2000 * 32
    assert rows["Variational, full"].gradients == 2000 * 4
    assert rows["Expectation propagation"].gradients is None
    assert rows["Laplace"].gradients < 50
    assert all(row.seconds > 0 for row in rows.values())


def test_errors_of_gaussians_are_those_of_their_moments(study):
    rows = {row.method: row for row in study.comparison}
    inverse = torch.linalg.inv(torch.linalg.cholesky(study.exact.covariance))
    identity = torch.eye(2, dtype=torch.float64)
    for name in ("Laplace", *GAUSSIANS):
        q = study.fits[name].posterior
        covariance = inverse @ q.gaussian.precision.covariance() @ inverse.T
        assert rows[name].mean_error == pytest.approx(float((inverse @ (q.point() - study.exact.mean)).norm()))
        assert rows[name].covariance_error == pytest.approx(float((covariance - identity).norm()))
    exact = study.exact.log_evidence
    assert rows["Laplace"].evidence_error == pytest.approx(study.document()["laplace"]["log_evidence"] - exact)
    bounds = {" ".join(part.name.split()): part.elbo for part in study.decompositions}
    for name in ("Variational, factorised", "Variational, full"):
        assert rows[name].bound
        assert rows[name].log_evidence == bounds[name]
    assert not rows["Expectation propagation"].bound
    assert all(rows[name].log_evidence is None for name in SAMPLERS)


def test_moments_of_chains_and_their_errors():
    """Against plain moments of all draws, and against independent chains whose errors are known."""
    draws = 1 + torch.randn((400, 30, 2), generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    result = pooled(draws.mean(1), draws.mT @ draws / 30)
    torch.testing.assert_close(result.mean, draws.reshape(-1, 2).mean(0))
    torch.testing.assert_close(result.covariance, torch.cov(draws.reshape(-1, 2).T, correction=0))
    deviation = 1 / math.sqrt(12_000)
    torch.testing.assert_close(result.mean_error, torch.full((2,), deviation, dtype=torch.float64), rtol=0.15, atol=0)
    wanted = deviation * torch.tensor([[math.sqrt(2), 1], [1, math.sqrt(2)]], dtype=torch.float64)
    torch.testing.assert_close(result.covariance_error, wanted, rtol=0.15, atol=0)


def test_the_claims_hold_and_can_fail(study):
    weak = [claim for claim in study.claims if claim.startswith("Langevin is biased")]  # so few draws do not show it
    assert {claim for claim, holds in study.claims.items() if not holds} <= set(weak)
    for row, change, words in (
        ("HMC", {"covariance_error": 1.0}, "mean and covariance are exact"),
        ("HMC", {"move": 0.1}, "goes more than twice as far"),
        ("HMC", {"ess_per_transition": 0.01}, "worth more than three"),
        ("Metropolis, short steps", {"ess_per_1000_gradients": 1e3}, "more effective draws"),
        ("Langevin", {"mean_error": 0.0, "covariance_error": 0.0}, "Langevin is biased"),
        ("Laplace", {"evidence_error": 0.0}, "nearer than Laplace"),
        ("Variational, full", {"mean_error": 0.0}, "nearer than both variational"),
        ("Variational, full", {"evidence_error": 0.1}, "below the log evidence"),
    ):
        rows = [replace(item, **change) if item.method == row else item for item in study.comparison]
        assert [holds for claim, holds in claims(rows).items() if words in claim] == [False]
    points = study.bias.posterior
    wrong = replace(study.bias, posterior=(replace(points[0], langevin=2.0, mala=1.5), *points[1:]))
    assert list(wrong.claims().values()) == [True, False, False, False]
    worse = replace(study.bias, gaussian=(replace(study.bias.gaussian[0], langevin=2.0),))
    assert next(iter(worse.claims().values())) is False


def test_langevin_variances_have_their_closed_form(study):
    precisions = torch.linalg.eigvalsh(torch.linalg.inv(study.regression.covariance)).tolist()
    for point in study.bias.gaussian:
        assert min(abs(point.precision - precision) for precision in precisions) < 1e-9
        assert point.theory == pytest.approx(1 / (1 - point.step_size * point.precision / 2))
        assert abs(point.langevin - point.theory) < 5 * point.langevin_error
    largest = study.bias.posterior[-1]
    assert largest.langevin - 1 > 20 * largest.langevin_error
    assert abs(largest.mala - 1) < 5 * largest.mala_error


def test_the_first_order_of_the_bias_is_that_of_chains_solved_on_a_grid():
    """Rows that differ in one input alone leave the other weight its prior, and two chains in one dimension."""
    inputs = torch.tensor(INPUTS, dtype=torch.float64) * torch.tensor([1.0, 0.0])
    labels = torch.tensor(LABELS, dtype=torch.float64)
    regression = fit(inputs, labels, PRIOR_SCALE)
    bias = langevin_bias(regression, exact_posterior(regression), chains=20, draws=4, seed=0)
    slopes = [_growth(inputs[:, 0], labels), 1 / (2 * PRIOR_SCALE**2)]  # of the prior, of precision h: h / 2
    for point in bias.posterior:
        assert (point.theory - 1) / point.step_size == pytest.approx(sum(slopes) / 2, rel=5e-3)


def _growth(x, labels):
    """d / ds at s = 0 of the variance of Langevin steps of size s, relative, from stationary laws on a grid."""
    w = torch.linspace(-7.0, 11.0, 301, dtype=torch.float64)
    drift = (labels - torch.sigmoid(w[:, None] * x)) @ x - w / PRIOR_SCALE**2
    log_density = -torch.nn.functional.softplus(w[:, None] * x * (1 - 2 * labels)).sum(1) - w**2 / (2 * PRIOR_SCALE**2)

    def variance(mass):
        return float(mass @ (w - mass @ w) ** 2)

    def growth(size):
        steps = torch.softmax(-((w - (w + size * drift)[:, None]) ** 2) / (4 * size), dim=1)  # rows: from
        system = torch.cat([steps.T - torch.eye(len(w)), torch.ones(1, len(w))]).double()
        law = torch.linalg.lstsq(system, torch.eye(len(w) + 1, dtype=torch.float64)[:, -1:]).solution[:, 0]
        return (variance(law) / variance(log_density.softmax(0)) - 1) / size

    return 2 * growth(0.02) - growth(0.04)  # without the second order


def test_contours_hold_their_shares(study):
    exact = study.exact
    for share, level in zip((0.5, 0.9), exact.levels((0.5, 0.9)), strict=True):
        assert float(exact.mass[exact.mass / exact.cell >= level].sum()) == pytest.approx(share, abs=1e-3)
    assert float(exact.mass.max() / exact.cell) > exact.levels((0.5,))[0]


@pytest.mark.parametrize(("option", "value"), [("chains", 19), ("draws", 3), ("points", 1)])
def test_too_small_a_study_is_refused(option, value):
    with pytest.raises(ValueError, match=f"{option} must be at least {value + 1}"):
        Settings(**{option: value})


def test_the_document_is_json(study):
    document = study.document()
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    assert document["seed"] == 3
    assert [row["method"] for row in document["methods"]] == list(study.maps)


def test_every_figure_is_drawn(study, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a glyph that the font lacks, an empty contour
        assert draw(study, tmp_path / "new") == FIGURES
    for name in FIGURES:
        assert (tmp_path / "new" / name).read_bytes().startswith(b"\x89PNG")
