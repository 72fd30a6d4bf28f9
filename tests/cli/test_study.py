"""`posterity study`: the tables, the JSON document, the folder, and what is refused."""

import json
import os

import pytest

from posterity.studies import logistic as package
from posterity.studies.logistic import multiclass

pytestmark = pytest.mark.cpu


@pytest.fixture
def quick(monkeypatch):
    """Small maps of three classes, whose integrals take most of the time, and no drawing."""
    monkeypatch.setattr(multiclass, "SIDE", 3)
    monkeypatch.setattr(package, "draw", lambda study, folder: ["maps.png"])


@pytest.mark.usefixtures("quick")
def test_the_tables_and_the_folder(run, tmp_path):
    folder = tmp_path / "a" / "study"
    result = run("study", "logistic", "--out", folder, "--seed", "2")
    assert result.code == 0
    shown = " ".join(result.out.split())
    assert "Laplace, exact integral 0.969762 0.969762" in shown
    assert "Laplace, probit κ 0.952382 0.952382" in shown
    assert "log evidence: exact -5.728343, Laplace -5.806578" in shown
    assert shown.count("-5.7283431") == 6
    assert "Variational, factorised" in shown
    assert "Monte Carlo: 4,000,000 draws here, 10,000 in maps and curves." in shown
    assert "…" not in result.out
    assert f"figures and results.json: {folder}" in shown
    assert "computing" in result.err
    stored = json.loads((folder / "results.json").read_text())
    assert stored["study"] == "logistic"
    assert stored["seed"] == 2
    assert stored["command"] == f"posterity study logistic --out {folder.name} --seed 2"
    assert stored["figures"] == ["maps.png"]
    assert {"posterity", "python", "torch", "matplotlib"} == set(stored["versions"])
    assert stored["date"].endswith("+00:00")
    assert stored["machine"]["cpu"]
    assert stored["machine"]["cores"] == os.cpu_count()


@pytest.mark.usefixtures("quick")
def test_json_is_what_is_stored_in_the_default_folder(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run("study", "logistic", "--json", "--quiet")
    assert result.code == 0
    assert result.err == ""
    assert json.loads(result.out) == json.loads((tmp_path / "study-logistic" / "results.json").read_text())
    assert os.listdir(tmp_path) == ["study-logistic"]


def test_an_unknown_study_is_met_with_the_nearest(run):
    result = run("study", "logistik")
    assert result.code == 2
    error, hint = result.err.splitlines()
    assert "'logistic'" in error
    assert hint == (
        "hint: the studies are logistic, gradients, images, uci, dropout, moons, calibration, posteriors, mixtures, "
        "hyperparameters, collapse, temperature, penalties."
    )


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_a_seed_that_no_generator_takes_is_refused(run, seed):
    result = run("study", "logistic", "--seed", seed)
    assert result.code == 2
    assert f"Got {seed}." in result.err


def test_a_file_is_refused_as_folder_before_anything_is_computed(run, tmp_path, monkeypatch):
    monkeypatch.setattr(package, "logistic", lambda seed: pytest.fail("computed"))
    (tmp_path / "file").write_text("mine")
    result = run("study", "logistic", "--out", tmp_path / "file")
    assert result.code == 2
    assert "--out must be a folder" in result.err
    assert (tmp_path / "file").read_text() == "mine"


def test_moons(run, tmp_path, monkeypatch):
    from posterity.studies import moons

    for name, value in (("STEPS", 30), ("ROWS", 30), ("HIDDEN", 6), ("DRAWS", 10), ("SIDE", 5)):
        monkeypatch.setattr(moons.fits, name, value)
    monkeypatch.setattr(moons, "draw", lambda study, folder: ["entropy.png"])
    monkeypatch.setenv("COLUMNS", "80")
    result = run("study", "moons", "--out", tmp_path / "study", "--seed", "4")
    assert result.code == 0
    shown = " ".join(result.out.split())
    assert "Two moons, 30 rows, 5 seeds" in shown
    assert sum(line.count("±") == 4 for line in result.out.splitlines()) == 7
    assert "…" not in result.out
    stored = json.loads((tmp_path / "study" / "results.json").read_text())
    assert stored["seeds"] == [4, 5, 6, 7, 8]
    assert stored["command"] == "posterity study moons --out study --seed 4"
