"""The benchmark of mixtures: both sides run the same rounds, and the table says what it should."""

import json
import sys
from pathlib import Path

import pytest
import torch
from benchmarkfiles import load

mixtures = load("mixtures")
pytestmark = pytest.mark.cpu


@pytest.mark.parametrize("case", [mixtures.Case(2, 1, 500), mixtures.Case(3, 4, 800)])
def test_both_sides_run_the_same_rounds(case):
    points, start = mixtures.problem(case, torch.float64, seed=0)
    ours = mixtures.posterity_rounds(mixtures.rows_of(points), start)
    theirs = mixtures.peer_rounds(points, start)()
    assert mixtures.difference(ours, theirs) < 1e-10
    assert ours.log_density == pytest.approx(theirs.log_density, rel=1e-12)
    assert mixtures.difference(start, theirs) > 1e-4  # the rounds had something to do


def test_differences_are_relative_to_the_largest_number_of_each():
    one = mixtures.Fitted(torch.tensor([0.5]), torch.tensor([[100.0]]), torch.tensor([[[1.0]]]), 0.0)
    other = one._replace(means=torch.tensor([[101.0]]))
    assert mixtures.difference(other, one) == pytest.approx(0.01)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
def test_the_table_has_speed_memory_and_agreement(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(mixtures, "CASES", {"tiny": mixtures.Case(2, 2, 400)})
    monkeypatch.setattr(sys, "argv", ["mixtures.py", "--rounds", "2", "--results", str(tmp_path)])
    mixtures.main()
    found = json.loads((tmp_path / "mixtures.json").read_text())
    assert [len(table["timings"]) for table in found["comparisons"]] == [3, 4]
    for table in found["comparisons"]:
        columns = table["columns"]
        assert set(columns["peak MiB"]) == {timing["name"] for timing in table["timings"]}
        assert columns["x posterity (by round)"][mixtures.PEER] > 0.0
        assert columns["off the peer in float64"][mixtures.OURS] < 1e-9
    assert "400 rows in float32" in capsys.readouterr().out
