"""`posterity study gradients`: the tables and the folder."""

import pytest

from posterity_studies.gradients import example, network

pytestmark = pytest.mark.cpu


def test_the_tables_and_the_folder(study, monkeypatch):
    monkeypatch.setattr(network, "REPEATS", 4)
    monkeypatch.setattr(network, "STEPS", 20)
    monkeypatch.setattr(example, "SAMPLES", 1000)
    found = study("gradients", seed=2)
    assert "f = w^2 score function" in found.shown
    assert "pathwise, antithetic 0 0 " in found.shown
    assert "q after training" in found.shown
    assert len(found.stored["network"]["estimators"]) == 2 * len(network.ESTIMATORS)
    assert found.stored["one_weight"]
