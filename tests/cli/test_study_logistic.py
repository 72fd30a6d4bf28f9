"""`posterity study logistic`: the tables."""

import pytest

from posterity_studies.logistic import multiclass

pytestmark = pytest.mark.cpu


def test_the_tables_and_the_folder(study, monkeypatch):
    monkeypatch.setattr(multiclass, "SIDE", 3)  # of maps of three classes, whose integrals take most of the time
    result = study("logistic", seed=2, once=True)
    assert "Laplace, exact integral 0.969762 0.969762" in result.shown
    assert "Laplace, probit κ 0.952382 0.952382" in result.shown
    assert "log evidence: exact -5.728343, Laplace -5.806578" in result.shown
    assert result.shown.count("-5.7283431") == 6
    assert "Variational, factorised" in result.shown
    assert "Monte Carlo: 4,000,000 draws here, 10,000 in maps and curves." in result.shown
    assert "computing" in result.err
    assert result.stored["seed"] == 2
