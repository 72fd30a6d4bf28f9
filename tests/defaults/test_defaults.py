"""Methods at their defaults come to their own optimum, or say that they have not: a part of `benchmarks.defaults`."""

import functools
import json
import logging
import warnings

import pytest
import torch
from benchmarkfiles import load

import posterity as po

cases = load("defaults_cases")
methods = load("defaults_methods")
measures = load("defaults_measures")
defaults = load("defaults")

pytestmark = pytest.mark.cpu  # truths and references are on the CPU

LINEAR = [f"linear-{index:02d}" for index in range(4)]
GLM = ["logistic-2", "poisson-2"]
REFERENCE_STEPS = 2000


@functools.cache
def case(name):
    return cases.makers()[name]()


@functools.cache
def start(name):
    return methods.fit(methods.METHODS["MAP"], case(name), None).posterior


def measured(name, method):
    row = measures.measured(method, case(name), start(name), reference_steps=REFERENCE_STEPS)
    assert not row.error
    return row


# The defaults themselves.


@pytest.mark.parametrize("name", LINEAR + GLM)
def test_map_reaches_the_mode(name):
    row = measured(name, "MAP")
    assert row.distance <= 0.05
    assert row.worst_distance <= 0.2


@pytest.mark.parametrize("name", LINEAR)
def test_laplace_is_the_posterior_of_a_linear_regression_whose_scales_are_given(name):
    row = measured(name, "Laplace")
    assert row.distance <= 0.05
    assert row.spread_error <= 0.02
    assert row.gap <= 0.1


@pytest.mark.parametrize("name", GLM)
def test_laplace_has_the_curvature_at_the_mode_under_the_prior_that_is_given(name):
    row = measured(name, "Laplace")
    assert row.distance <= 0.05
    assert row.spread_error <= 0.02


@pytest.mark.parametrize(
    ("name", "method"),
    [(name, "MeanField") for name in ("linear-00", "linear-01", "linear-03", *GLM)]
    + [("linear-00", "NaturalGradient"), ("linear-03", "FullRank")],
)
def test_variational_methods_come_within_a_tenth_of_a_nat_of_their_best_elbo(name, method):
    row = measured(name, method)
    assert -1e-6 * abs(row.best) <= row.gap <= 0.1


def test_map_of_a_network_is_near_the_mode_of_its_basin():
    row = measured("mlp-1-12-1", "MAP")
    assert row.distance <= 1.0
    assert row.below_mode >= 0.0
    assert not row.silent


def test_mean_field_of_a_network_is_near_what_a_long_run_makes_of_it():
    row = measured("mlp-1-12-1", "MeanField")
    assert row.gap_error <= 0.005 * abs(row.best)
    assert row.gap <= 0.02 * abs(row.best)
    assert not row.silent


# The instrument.


@pytest.mark.parametrize("name", LINEAR)
def test_the_truth_of_a_linear_regression_is_that_of_the_exact_method(name):
    row = measured(name, "Conjugate")
    assert row.distance <= 1e-2
    assert row.spread_error <= 1e-4
    assert abs(row.gap) <= 1e-3
    q, _ = po.infer(po.methods.Conjugate(), case(name).joint(), case(name).train, progress=False)
    assert float(q.log_evidence) == pytest.approx(case(name).truth.moments.log_evidence, rel=1e-4, abs=0.01)
    assert case(name).truth.best_elbo(full=False) <= row.best + 1e-9
    assert case(name).truth.best_evidence() >= case(name).truth.moments.log_evidence


@pytest.mark.parametrize("name", ["logistic-1", "logistic-2", "poisson-1", "poisson-2"])
def test_quadratures_agree_with_importance_sampling_and_bound_every_elbo(name):
    truth = case(name).truth
    leaf = truth.mode.clone().requires_grad_()
    (slope,) = torch.autograd.grad(truth.log_joint(leaf), leaf)
    assert float(slope.abs().max()) < 1e-8
    hessian = torch.autograd.functional.hessian(truth.log_joint, truth.mode)
    torch.testing.assert_close(-hessian, truth.precision(truth.mode))
    proposal = torch.distributions.MultivariateNormal(truth.mode, 2.0 * truth.covariance)
    draws = proposal.sample((200_000,))
    logs = truth.log_joint(draws) - proposal.log_prob(draws)
    weights = logs.softmax(0)
    error = float(((weights * len(weights)) - 1.0).std()) / len(weights) ** 0.5
    log_evidence = float(logs.logsumexp(0)) - torch.tensor(float(len(draws))).log().item()
    assert abs(log_evidence - truth.moments.log_evidence) < 5.0 * error
    off = (weights @ draws - truth.moments.mean) / truth.moments.scale
    assert float(off.abs().max()) < 10.0 * error
    factorised, full = truth.best_elbo(full=False), truth.best_elbo(full=True)
    assert factorised <= full + 1e-9 < truth.moments.log_evidence
    assert truth.moments.log_evidence - full < 0.1


def test_the_elbo_of_a_generalised_linear_model_is_that_of_the_library():
    problem = case("poisson-2")
    joint, truth = problem.joint(), problem.truth
    precision = po.precisions.Dense(truth.precision(truth.mode))
    q = po.posteriors.Gaussian(joint, truth.mode.float(), precision, {})
    bound = po.evidence.elbo(q, problem.train, draws=4000)
    own = float(truth.elbo(truth.mode, torch.linalg.cholesky(truth.covariance)))
    assert abs(own - bound.elbo) < 5.0 * bound.standard_error


def test_outputs_and_densities_of_networks_are_those_of_the_joint():
    problem = case("mlp-1-12-1")
    joint = problem.joint()
    thetas = torch.randn(3, joint.num_weights, generator=torch.Generator().manual_seed(0))
    expected = torch.stack([joint.outputs(theta, problem.train[0]) for theta in thetas])
    torch.testing.assert_close(problem.outputs(thetas, problem.train[0]), expected, rtol=1e-5, atol=1e-5)
    value = joint.log_density(thetas[0], po.model.Batch(*problem.train))
    assert float(measures.log_joint(problem, joint, thetas[0].double())) == pytest.approx(float(value), rel=1e-5)


@pytest.mark.parametrize("kind", ["diagonal", "low rank", "full"])
def test_a_long_run_finds_the_nats_that_a_gaussian_is_short_of(kind):
    """On a linear layer the largest ELBO is known."""
    problem = case("linear-01")
    truth, joint = problem.truth, problem.joint()
    size = len(truth.mode)
    scale = truth.covariance.diagonal().sqrt() if kind != "diagonal" else truth.precision(truth.mode).diagonal().rsqrt()
    variance = (1.2 * scale).square()
    low_rank = po.precisions.LowRankCovariance(variance, 0.1 * scale * torch.eye(size, dtype=torch.float64))
    precision = low_rank if kind == "low rank" else po.precisions.Diagonal(variance.reciprocal())
    q = po.posteriors.Gaussian(joint, (truth.mode + 0.3 * scale).float(), precision, {})
    start = float(truth.elbo(q.mean.double(), torch.linalg.cholesky(precision.covariance())))
    best, gap, error = measures.elbo_gap(problem, joint, q, kind, 1500)
    optimum = truth.best_elbo(full=kind != "diagonal")
    assert gap == pytest.approx(optimum - start, abs=0.05 + 5.0 * error)
    assert best == pytest.approx(optimum, abs=0.3)


def test_a_point_off_the_mode_is_as_far_as_it_was_moved():
    problem = case("linear-02")
    truth, entry = problem.truth, methods.METHODS["MAP"]
    off = truth.mode + 0.4 * truth.covariance.diagonal().sqrt()
    row = measures.Row("linear-02", "linear", "MAP")
    measures._against_truth(row, entry, truth, po.posteriors.Point(problem.joint(), off.float()))
    assert row.distance == pytest.approx(0.4, rel=1e-2)
    row.far = measures._far(row, entry, network=False)
    assert row.far == ["distance"]
    assert row.silent
    row.said = ["MAP has not converged"]
    assert not row.silent


def test_warnings_about_the_result_are_heard_and_those_about_speed_are_not():
    said = []
    with methods.listening(said):
        logging.getLogger("posterity").warning("MAP is %s", "far")
        logging.getLogger("posterity").info("nothing")
        logging.getLogger("posterity").warning("members run one after the other because ...")
        warnings.warn("beware", stacklevel=1)
    assert said == ["MAP is far", "beware"]


def test_an_error_is_a_result():
    def refuse(case):
        raise ValueError("no such rank")

    done = methods.fit(methods.Entry(refuse, "full"), case("linear-00"), None)
    assert done.posterior is None
    assert done.error == "ValueError: no such rank"


def test_every_inference_method_of_the_library_has_an_entry():
    kinds = [getattr(po.methods, name) for name in po.methods.__all__]
    inference = {kind.__name__ for kind in kinds if issubclass(kind, po.inference.Method)}
    elsewhere = {"CoordinateAscent", "ExpectationMaximization"}  # of mixtures: they take no joint
    assert inference - elsewhere <= set(methods.METHODS)


def test_a_run_replaces_its_own_rows_and_keeps_the_others(tmp_path):
    about = {"date": "today", "command": "c", "versions": {}, "threads": 1, "seed": 0}
    about["machine"] = {"cpu": "a CPU", "cores": 2}
    rows = [measures.Row("two-moons", "moons", "MAP", seconds=1.0), measures.Row("linear-00", "linear", "Laplace")]
    defaults.write(defaults.merged(tmp_path / "defaults.json", rows, about), about, ["a note"], tmp_path)
    new = [measures.Row("two-moons", "moons", "MAP", seconds=2.0, far=["distance"])]
    merged = defaults.merged(tmp_path / "defaults.json", new, about)
    assert [(row["case"], row["seconds"]) for row in merged] == [("linear-00", 0.0), ("two-moons", 2.0)]
    defaults.write(merged, about, [], tmp_path)
    text = (tmp_path / "defaults.md").read_text()
    assert "1 of 2 runs are far and silent: two-moons: MAP." in text
    assert json.loads((tmp_path / "defaults.json").read_text())["rows"] == merged
