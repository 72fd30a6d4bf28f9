"""`posterity study moons`: the table and the folder."""

import pytest

from posterity_studies.moons import fits

pytestmark = pytest.mark.cpu


def test_the_table_and_the_folder(study, monkeypatch):
    for name, value in (("STEPS", 30), ("ROWS", 30), ("HIDDEN", 6), ("DRAWS", 10), ("SIDE", 5)):
        monkeypatch.setattr(fits, name, value)
    result = study("moons", seed=4, once=True)
    assert "Two moons, 30 rows, 5 seeds" in result.shown
    assert sum(line.count("±") == 4 for line in result.out.splitlines()) == 7
    assert result.stored["seeds"] == [4, 5, 6, 7, 8]
