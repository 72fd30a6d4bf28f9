"""`posterity study posteriors`: the table and the folder."""

import json

import pytest

from posterity.studies import posteriors as package
from posterity.studies.posteriors import Comparison

pytestmark = pytest.mark.cpu


def test_the_table_and_the_folder(run, tmp_path, monkeypatch):
    rows = [
        Comparison("kidiq-kidscore_interaction", "Density", 5, 1.5, 2.5, 1.003, 6543.2, 0.0, 7.0, 12.0),
        Comparison("eight_schools-eight_schools_noncentered", "Density", 10, 4.5, 1.0, 1.002, 4000.0, 0.002, 15.0, 3.0),
    ]
    monkeypatch.setattr(package, "posteriors", lambda seed: iter(rows))
    monkeypatch.setattr(package, "draw", lambda study, folder: ["errors.png"])
    result = run("study", "posteriors", "--out", tmp_path / "study", "--seed", "3")
    assert result.code == 0
    shown = " ".join(result.out.split())
    assert "kidscore_interaction Density 1.5 2.5 1.0030 6,543 0.00 12" in shown
    assert "eight_schools_noncentered Density 4.5" in shown
    assert "1 of 2 within" in shown
    assert "…" not in result.out
    stored = json.loads((tmp_path / "study" / "results.json").read_text())
    assert stored["command"] == "posterity study posteriors --out study --seed 3"
    assert [one["good"] for one in stored["posteriors"]] == [True, False]
    again = run("study", "posteriors", "--out", tmp_path / "again", "--json", "--quiet")
    assert again.err == ""
    assert json.loads(again.out)["posteriors"] == stored["posteriors"]
