"""`posterity study collapse`: the tables."""

import pytest

from posterity_studies.collapse import optima

pytestmark = pytest.mark.cpu


def test_the_tables_and_the_folder(study, monkeypatch):
    monkeypatch.setattr(optima, "ROWS", 10)
    monkeypatch.setattr(optima, "CLASS_ROWS", 20)
    monkeypatch.setattr(optima, "WIDTHS", (12, 1200, 12_000))
    monkeypatch.setattr(optima, "TAUS", (0.01,))
    result = study("collapse", seed=2, once=True)
    assert "eta = 1: KL(q* || P0) of the network" in result.shown
    assert "12,000" in result.shown
    assert "fixed: logistic loss" in result.shown
    assert "ReLU, 3 classes" in result.shown
    assert "Confidence of the averaged prediction, 3 classes" in result.shown
    assert "limit 0.3333" in result.shown
    assert "optima at eta = tau p/N: ReLU" in result.err
    assert {"widths", "untempered", "gaps", "balanced", "confidence"} < set(result.stored)
