"""`posterity study posteriors`: the table and the folder."""

import pytest

from posterity_studies.posteriors import study as module
from posterity_studies.posteriors.study import Comparison

pytestmark = pytest.mark.cpu


def test_the_table_and_the_folder(study, monkeypatch):
    rows = [
        Comparison("kidiq-kidscore_interaction", "Density", 5, 1.5, 2.5, 1.003, 6543.2, 0.0, 7.0, 12.0),
        Comparison("eight_schools-eight_schools_noncentered", "Density", 10, 4.5, 1.0, 1.002, 4000.0, 0.002, 15.0, 3.0),
    ]
    monkeypatch.setattr(module, "FORMS", [(row.posterior, row.form) for row in rows])
    monkeypatch.setattr(module, "compared", lambda name, *_: next(row for row in rows if row.posterior == name))
    result = study("posteriors", seed=3)
    assert "kidscore_interaction Density 1.5 2.5 1.0030 6,543 0.00 12" in result.shown
    assert "eight_schools_noncentered Density 4.5" in result.shown
    assert "1 of 2 within" in result.shown
    assert [posterior["good"] for posterior in result.stored["posteriors"]] == [True, False]
