"""`posterity study surface`: the tables and the folder."""

import pytest

from posterity_studies.surface import fits, problem

pytestmark = pytest.mark.cpu


def test_the_tables_and_the_folder(study, monkeypatch):
    for name, value in (("SIDE", 21), ("STEPS", 40)):
        monkeypatch.setattr(problem, name, value)
    for name, value in (("STEPS", 40), ("WARMUP", 10), ("DRAWS", 5)):
        monkeypatch.setattr(fits, name, value)
    result = study("surface", seed=2, once=True)
    assert "holds: descents on it end at two modes" in result.shown
    assert "two Laplace posteriors 0.5000" in result.shown
    assert len(result.stored["methods"]) == 6
