"""`posterity study mixtures`: the tables, the folder, and what is refused."""

import json

import pytest

from posterity.studies import mixtures as package
from posterity.studies.mixtures import clusters, partly, prior

pytestmark = pytest.mark.cpu


@pytest.fixture
def quick(monkeypatch):
    """Few fits of small problems, and no drawing."""
    monkeypatch.setattr(partly, "REPLICATES", 4)
    for name, value in (("COUNT", 60), ("STARTS", 2), ("MOST", 2), ("RESTARTS", 2)):
        monkeypatch.setattr(clusters, name, value)
    for name, value in (("SCALES", (0.5, 2.0)), ("DATA_SETS", 2), ("STEPS", 30), ("ROUNDS", 3), ("TEST", 20)):
        monkeypatch.setattr(prior, name, value)
    monkeypatch.setattr(package, "draw", lambda study, folder: ["bound.png"])


@pytest.mark.usefixtures("quick")
def test_the_tables_and_the_folder(run, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    result = run("study", "mixtures", "--out", tmp_path / "study", "--seed", "2")
    assert result.code == 0
    shown = " ".join(result.out.split())
    assert "Two normal densities, 200 points" in shown
    assert "by EM 0." in shown
    assert "-20.916884" in shown
    assert "misprint: KL of the first point alone" in shown
    assert "k-means++" in shown
    assert "variational EM: " in shown
    assert f"figures and results.json: {tmp_path / 'study'}" in shown
    assert "…" not in result.out
    assert "priors of a network: 2 data sets" in result.err
    stored = json.loads((tmp_path / "study" / "results.json").read_text())
    assert stored["command"] == "posterity study mixtures --out study --seed 2"
    assert stored["figures"] == ["bound.png"]
    again = run("study", "mixtures", "--out", tmp_path / "again", "--seed", "2", "--json", "--quiet")
    assert again.err == ""
    document = json.loads(again.out)
    for part in ("example", "miniature", "labels", "clusters", "priors"):
        assert document[part] == stored[part]


@pytest.mark.parametrize(
    ("options", "word"),
    [(("--seed", "-1"), "Got -1."), (("--seed", "often"), "'--seed'"), (("--componets", "5"), "--componets")],
)
def test_bad_options_are_one_line_and_nothing_is_computed(run, monkeypatch, options, word):
    monkeypatch.setattr(package, "mixtures", lambda *_, **__: pytest.fail("computed"))
    result = run("study", "mixtures", *options)
    assert result.code == 2
    assert word in result.err
    assert "Traceback" not in result.err
    assert len(result.err.splitlines()) <= 2


def test_a_file_is_refused_as_folder_before_anything_is_computed(run, tmp_path, monkeypatch):
    monkeypatch.setattr(package, "mixtures", lambda *_, **__: pytest.fail("computed"))
    (tmp_path / "file").write_text("mine")
    result = run("study", "mixtures", "--out", tmp_path / "file")
    assert result.code == 2
    assert "--out must be a folder" in result.err
