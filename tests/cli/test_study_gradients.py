"""`posterity study gradients`: the tables and the folder."""

import pytest

from posterity_studies.gradients import example, network

pytestmark = pytest.mark.cpu


def test_the_tables_and_the_folder(study, monkeypatch):
    monkeypatch.setattr(network, "REPEATS", 4)
    monkeypatch.setattr(network, "STEPS", 20)
    monkeypatch.setattr(example, "SAMPLES", 1000)
    result = study("gradients", seed=2)
    assert "f = w^2 score function" in result.shown
    assert "pathwise, antithetic 0 0 " in result.shown
    assert "q after training" in result.shown
    assert len(result.stored["network"]["estimators"]) == 2 * len(network.ESTIMATORS)
    assert result.stored["one_weight"]
