"""`posterity study gradients`: the tables and the folder."""

import json

import pytest

from posterity.studies import gradients as package
from posterity.studies.gradients import example, network

pytestmark = pytest.mark.cpu


def test_the_tables_and_the_folder(run, tmp_path, monkeypatch):
    monkeypatch.setattr(network, "REPEATS", 4)
    monkeypatch.setattr(network, "STEPS", 20)
    monkeypatch.setattr(example, "SAMPLES", 1000)
    monkeypatch.setattr(package, "draw", lambda study, folder: ["one_weight.png"])
    result = run("study", "gradients", "--out", tmp_path / "study", "--seed", "2")
    assert result.code == 0
    shown = " ".join(result.out.split())
    assert "f = w^2 score function" in shown
    assert "pathwise, antithetic 0 0 " in shown
    assert "q after training" in shown
    assert f"figures and results.json: {tmp_path / 'study'}" in shown
    assert "…" not in result.out
    stored = json.loads((tmp_path / "study" / "results.json").read_text())
    assert stored["command"] == "posterity study gradients --out study --seed 2"
    assert len(stored["network"]["estimators"]) == 2 * len(network.ESTIMATORS)
    again = run("study", "gradients", "--out", tmp_path / "again", "--seed", "2", "--json", "--quiet")
    assert again.err == ""
    document = json.loads(again.out)
    assert document["network"] == stored["network"]
    assert document["one_weight"] == stored["one_weight"]
