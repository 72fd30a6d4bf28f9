"""The study of gradient variances: exact values against gold, estimates against both, and the figures."""

import json
import warnings

import pytest
import torch
from goldcases import load

from posterity.methods.parts.gradients import WeightSampling
from posterity.numerics.random import Key
from posterity_studies.gradients import example, network
from posterity_studies.gradients.example import total_variance
from posterity_studies.gradients.figures import draw
from posterity_studies.gradients.study import run
from posterity_studies.options import Settings

pytestmark = pytest.mark.cpu
GOLD = {"w^2": "quadratic_w2", "log sigmoid(w)": "log_sigmoid"}


@pytest.fixture(scope="module")
def study():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(network, "REPEATS", 60)
        patch.setattr(network, "STEPS", 600)
        patch.setattr(example, "SAMPLES", 100_000)
        return run(Settings(seed=1))


def test_q_is_that_of_the_gold_case():
    inputs = load("gradient_estimators").inputs
    assert (inputs["mu"], inputs["sigma"]) == (example.MEAN, example.SCALE)


@pytest.mark.parametrize("name", list(GOLD))
def test_exact_variances_are_gold(name):
    case, result = load("gradient_estimators"), example.exact_variances(name)
    mean, scale = result["pathwise"]
    case.check(f"{GOLD[name]}.var_pathwise_mu", mean)
    case.check(f"{GOLD[name]}.var_pathwise_sigma", scale)
    mean, scale = result["score function"]
    case.check(f"{GOLD[name]}.var_score_mu", mean)
    case.check(f"{GOLD[name]}.var_score_sigma", scale)
    case.check(f"{GOLD[name]}.var_score_mu_optimal_baseline", result["score with baseline"][0])


def test_exact_variances_of_a_parabola_are_the_closed_forms():
    m, s = example.MEAN, example.SCALE
    result = example.exact_variances("w^2")
    assert result["pathwise, antithetic"] == pytest.approx((0.0, 2 * 8 * s**2), abs=1e-12)  # (2 m + 2 s e) e in pairs
    assert result["stick the landing"][0] == pytest.approx((2 * s + 1 / s) ** 2)
    assert result["score function"][0] == pytest.approx(m**4 / s**2 + 14 * m**2 + 15 * s**2)


def test_every_estimate_for_one_weight_is_exact_within_its_error(study):
    assert len(study.example) == 10
    for row in study.example:
        for result in (row.mean, row.scale):
            assert abs(result.value - result.exact) < 5 * result.error + 1e-9, row


def test_estimators_of_the_network_agree_and_rank_as_known(study):
    when = {
        name: {row.estimator: row for row in study.network if row.when == name}
        for name in ("at the start", "after training")
    }
    for rows in when.values():
        assert list(rows) == list(network.ESTIMATORS)
        value = {name: row.mean.value for name, row in rows.items()}
        assert value["score function"] > 3 * value["score with baseline"] > 9 * value["pathwise"]
        assert value["local reparameterisation"] < 0.3 * value["pathwise"]
        assert value["flipout"] < 0.3 * value["pathwise"]
    start, trained = when["at the start"], when["after training"]
    landed = [rows["stick the landing"].scale.value / rows["pathwise"].scale.value for rows in (start, trained)]
    assert landed[1] < 1.2 < 10 < landed[0]  # it pays near the optimum only


@pytest.fixture(scope="module")
def precise():
    """The problem, and each of its families with gradients by many draws."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(network, "STEPS", 600)
        result = network.problem(seed=2)
    plan = network.Plan(WeightSampling(draws=20, antithetic=True))
    return result, [(q, network.gradients(result, q, plan, Key(0), 60)) for q in result.families.values()]


@pytest.mark.parametrize("name", [name for name in network.ESTIMATORS if not name.startswith("score")])
def test_every_estimator_has_the_same_mean(name, precise):
    result, families = precise
    for q, reference in families:
        estimates = network.gradients(result, q, network.ESTIMATORS[name], Key(1), 60)
        for estimate, other in zip(estimates, reference, strict=True):
            variance = estimate.var(0) / len(estimate) + other.var(0) / len(other)
            difference = (estimate.mean(0) - other.mean(0)).square().sum()
            assert float(difference) < 4 * float(variance.sum()), name


def test_the_variance_and_its_error_are_those_of_a_normal_sample():
    sample = 2.0 * torch.randn((4000, 3), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    result = total_variance(sample, passes=5)
    assert result.value == pytest.approx(5 * float(sample.var(0).sum()))
    assert result.error == pytest.approx(5 * (2 * 3 / 4000) ** 0.5 * 4, rel=0.1)
    assert abs(result.value - 60.0) < 5 * result.error


def test_document_and_figures(study, tmp_path):
    document = study.document()
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    assert document["one_weight"]["estimators"][0]["mean"]["exact"] == pytest.approx(10.760625)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        names = draw(study, tmp_path)
    assert names == ["one_weight.png", "network.png"]
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in names)
