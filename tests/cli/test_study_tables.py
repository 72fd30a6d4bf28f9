"""The tables and the folders of studies, with small constants."""

import pytest

from posterity_studies.gradients import network
from posterity_studies.posteriors.study import Comparison

pytestmark = pytest.mark.cpu

SMALL = {
    "collapse.optima": {"ROWS": 10, "CLASS_ROWS": 20, "WIDTHS": (12, 1200, 12_000), "TAUS": (0.01,)},
    "gradients.example": {"SAMPLES": 1000},
    "gradients.network": {"REPEATS": 4, "STEPS": 20},
    "misspecification.models": {"LABELS": 4},
    "misspecification.study": {"TEMPERATURES": (0.1, 10.0, 5)},
    "mixtures.clusters": {"COUNT": 60, "STARTS": 2, "MOST": 2, "RESTARTS": 2},
    "mixtures.partly": {"REPLICATES": 4},
    "mixtures.prior": {"SCALES": (0.5, 2.0), "DATA_SETS": 2, "STEPS": 30, "ROUNDS": 3, "TEST": 20},
    "moons.fits": {"STEPS": 30, "ROWS": 30, "HIDDEN": 6, "DRAWS": 10, "SIDE": 5},
    "surface.fits": {"STEPS": 40, "WARMUP": 10, "DRAWS": 5},
    "surface.problem": {"SIDE": 21, "STEPS": 40},
}


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    for module, constants in SMALL.items():
        for name, value in constants.items():
            monkeypatch.setattr(f"posterity_studies.{module}.{name}", value)


def test_collapse(study):
    result = study("collapse", seed=2, once=True)
    assert "eta = 1: KL(q* || P0) of the network" in result.shown
    assert "12,000" in result.shown
    assert "fixed: logistic loss" in result.shown
    assert "ReLU, 3 classes" in result.shown
    assert "Confidence of the averaged prediction, 3 classes" in result.shown
    assert "limit 0.3333" in result.shown
    assert "optima at eta = tau p/N: ReLU" in result.err
    assert {"widths", "untempered", "gaps", "balanced", "confidence"} < set(result.stored)


def test_gradients(study):
    result = study("gradients", seed=2)
    assert "f = w^2 score function" in result.shown
    assert "pathwise, antithetic 0 0 " in result.shown
    assert "q after training" in result.shown
    assert len(result.stored["network"]["estimators"]) == 2 * len(network.ESTIMATORS)
    assert result.stored["one_weight"]


def test_logistic(study):
    small = "--steps 20 --chains 20 --draws 5 --points 3"
    result = study("logistic", *small.split(), told=small, seed=2, once=True)
    assert "Laplace, exact integral 0.969762 0.969762" in result.shown
    assert "Laplace, probit κ 0.952382 0.952382" in result.shown
    assert "log evidence: exact -5.728343, Laplace -5.806578" in result.shown
    assert result.shown.count("-5.7283431") == 7
    assert "Variational, factorised" in result.shown
    assert "Monte Carlo: 4,000,000 draws here, 1,000,000 in curves, 10,000 in maps." in result.shown
    assert "Laplace 0.415 0.254 -0.078" in result.shown
    assert "Expectation propagation 0.009 0.094 -0.024" in result.shown
    assert result.shown.count("holds: ") + result.shown.count("FAILS: ") == len(result.stored["claims"]) == 12
    assert "chains" in result.err
    assert result.stored["seed"] == 2


def test_misspecification(study):
    result = study("misspecification", seed=2)
    assert "holds: well specified, no temperature is better than 1" in result.shown
    assert len(result.stored["curves"]) == 6


def test_mixtures(study):
    result = study("mixtures", seed=2)
    assert "Two normal densities, 200 points" in result.shown
    assert "by EM 0." in result.shown
    assert "-20.916884" in result.shown
    assert "misprint: KL of the first point alone" in result.shown
    assert "k-means++" in result.shown
    assert "variational EM: " in result.shown
    assert "priors of a network: 2 data sets" in result.err
    assert {"example", "miniature", "labels", "clusters", "priors"} < set(result.stored)


def test_moons(study):
    result = study("moons", seed=4, once=True)
    assert "Two moons, 30 rows, 5 seeds" in result.shown
    assert sum(line.count("±") == 4 for line in result.out.splitlines()) == 7
    assert result.stored["seeds"] == [4, 5, 6, 7, 8]


def test_posteriors(study, monkeypatch):
    rows = [
        Comparison("kidiq-kidscore_interaction", "Density", 5, 1.5, 2.5, 1.003, 6543.2, 0.0, 7.0, 12.0),
        Comparison("eight_schools-eight_schools_noncentered", "Density", 10, 4.5, 1.0, 1.002, 4000.0, 0.002, 15.0, 3.0),
    ]
    module = "posterity_studies.posteriors.study"
    monkeypatch.setattr(f"{module}.FORMS", [(row.posterior, row.form) for row in rows])
    monkeypatch.setattr(f"{module}.compared", lambda name, *_: next(row for row in rows if row.posterior == name))
    result = study("posteriors", seed=3)
    assert "kidscore_interaction Density 1.5 2.5 1.0030 6,543 0.00 12" in result.shown
    assert "eight_schools_noncentered Density 4.5" in result.shown
    assert "1 of 2 within" in result.shown
    assert [posterior["good"] for posterior in result.stored["posteriors"]] == [True, False]


def test_surface(study):
    result = study("surface", seed=2, once=True)
    assert "holds: descents on it end at two modes" in result.shown
    assert "two Laplace posteriors 0.5000" in result.shown
    assert len(result.stored["methods"]) == 6
