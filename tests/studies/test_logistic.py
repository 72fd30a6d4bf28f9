"""The study of logistic regression: its numbers against gold, and its figures."""

import json
import math
import warnings

import pytest
import torch
from goldcases import load

from posterity.model import Batch
from posterity.predictive import Probit
from posterity_studies.logistic import multiclass
from posterity_studies.logistic.exact import DIRECTIONS, exact_posterior, ray_limits, ray_marginal
from posterity_studies.logistic.figures import draw
from posterity_studies.logistic.fits import INPUTS, LABELS, PRIOR_SCALE, binary, fit
from posterity_studies.logistic.multiclass import with_bias
from posterity_studies.logistic.study import run
from posterity_studies.options import Settings

pytestmark = pytest.mark.cpu
FIGURES = ["maps.png", "rays.png", "laplace.png", "probit.png", "evidence.png", "multiclass.png"]


@pytest.fixture(scope="module")
def study():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multiclass, "SIDE", 9)  # the softmax integrals take most of the time
        return run(Settings(seed=3))


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
    factorised, full = study.variational.values()
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
    assert max(bound for name, bound in bounds.items() if "Variational" not in name) < result < richer


def test_the_variational_predictive_is_nearer_to_the_exact_one_than_laplace(study):
    rows = {row["method"]: row for row in study.document()["methods"]}
    laplace = rows["Laplace, exact integral"]["mean_error"]
    assert rows["Variational, factorised"]["mean_error"] < laplace
    assert rows["Variational, full"]["mean_error"] < laplace
    for name in study.variational:
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
    assert errors["Laplace, Monte Carlo"] < 0.02 < errors["Laplace, mean-field probit"] < errors["MAP"]
    for probs in study.multiclass.probs.values():
        torch.testing.assert_close(probs.sum(1), torch.ones(81, dtype=torch.float64))


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
