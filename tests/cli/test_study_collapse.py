"""`posterity study collapse`: the tables, the folder, and what is refused."""

import json

import pytest

from posterity.studies import collapse as package
from posterity.studies.collapse import cases, optima

pytestmark = pytest.mark.cpu


@pytest.fixture
def quick(monkeypatch):
    """Few rows, widths and temperatures, each seed computed once, and no drawing."""
    kept, right = {}, package.collapse

    def once(seed, report):
        if seed not in kept:
            kept[seed] = right(seed, report)
        return kept[seed]

    monkeypatch.setattr(package, "collapse", once)
    monkeypatch.setattr(cases, "ROWS", 10)
    monkeypatch.setattr(cases, "CLASS_ROWS", 20)
    monkeypatch.setattr(optima, "WIDTHS", (12, 1200, 12_000))
    monkeypatch.setattr(optima, "TAUS", (0.01,))
    monkeypatch.setattr(package, "draw", lambda study, folder: ["kl.png"])


@pytest.mark.usefixtures("quick")
def test_the_tables_and_the_folder(run, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    result = run("study", "collapse", "--out", tmp_path / "study", "--seed", "2")
    assert result.code == 0
    shown = " ".join(result.out.split())
    assert "eta = 1: KL(q* || P0) of the network" in shown
    assert "12,000" in shown
    assert "fixed: logistic loss" in shown
    assert "ReLU, 3 classes" in shown
    assert "Confidence of the averaged prediction, 3 classes" in shown
    assert "limit 0.3333" in shown
    assert f"figures and results.json: {tmp_path / 'study'}" in shown
    assert "…" not in result.out
    assert "optima at eta = tau p/N: ReLU" in result.err
    stored = json.loads((tmp_path / "study" / "results.json").read_text())
    assert stored["command"] == "posterity study collapse --out study --seed 2"
    assert stored["figures"] == ["kl.png"]
    again = run("study", "collapse", "--out", tmp_path / "again", "--seed", "2", "--json", "--quiet")
    assert again.err == ""
    document = json.loads(again.out)
    for part in ("widths", "untempered", "gaps", "balanced", "confidence"):
        assert document[part] == stored[part]


@pytest.mark.parametrize(
    ("options", "word"),
    [(("--seed", "-1"), "Got -1."), (("--seed", "often"), "'--seed'"), (("--widht", "5"), "--widht")],
)
def test_bad_options_are_one_line_and_nothing_is_computed(run, monkeypatch, options, word):
    monkeypatch.setattr(package, "collapse", lambda *_, **__: pytest.fail("computed"))
    result = run("study", "collapse", *options)
    assert result.code == 2
    assert word in result.err
    assert "Traceback" not in result.err
    assert len(result.err.splitlines()) <= 2


def test_a_file_is_refused_as_folder_before_anything_is_computed(run, tmp_path, monkeypatch):
    monkeypatch.setattr(package, "collapse", lambda *_, **__: pytest.fail("computed"))
    (tmp_path / "file").write_text("mine")
    result = run("study", "collapse", "--out", tmp_path / "file")
    assert result.code == 2
    assert "--out must be a folder" in result.err
