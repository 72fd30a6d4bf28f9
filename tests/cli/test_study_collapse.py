"""`posterity study collapse`: the tables."""

import pytest

from posterity_studies.collapse import cases, optima

pytestmark = pytest.mark.cpu


def test_the_tables_and_the_folder(study, monkeypatch):
    monkeypatch.setattr(cases, "ROWS", 10)
    monkeypatch.setattr(cases, "CLASS_ROWS", 20)
    monkeypatch.setattr(optima, "WIDTHS", (12, 1200, 12_000))
    monkeypatch.setattr(optima, "TAUS", (0.01,))
    found = study("collapse", seed=2, once=True)
    assert "eta = 1: KL(q* || P0) of the network" in found.shown
    assert "12,000" in found.shown
    assert "fixed: logistic loss" in found.shown
    assert "ReLU, 3 classes" in found.shown
    assert "Confidence of the averaged prediction, 3 classes" in found.shown
    assert "limit 0.3333" in found.shown
    assert "optima at eta = tau p/N: ReLU" in found.err
    assert {"widths", "untempered", "gaps", "balanced", "confidence"} < set(found.stored)
