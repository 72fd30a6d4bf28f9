"""`posterity study misspecification`: the table and the folder."""

import pytest

from posterity_studies.misspecification import models
from posterity_studies.misspecification import study as whole

pytestmark = pytest.mark.cpu


def test_the_table_and_the_folder(study, monkeypatch):
    monkeypatch.setattr(whole, "TEMPERATURES", (0.1, 10.0, 5))
    monkeypatch.setattr(models, "LABELS", 4)
    result = study("misspecification", seed=2)
    assert "holds: well specified, no temperature is better than 1" in result.shown
    assert len(result.stored["curves"]) == 6
