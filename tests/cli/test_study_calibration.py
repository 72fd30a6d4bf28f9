"""`posterity study calibration`: the table, the folder, and what is refused."""

import json

import pytest

from posterity.cli.study_calibration import METHODS, MODELS
from posterity.methods import HMC
from posterity.studies import calibration as package
from posterity.studies.calibration import models, recipes, study

pytestmark = pytest.mark.cpu


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(study, "RECIPES", dict.fromkeys(METHODS, lambda model: (HMC(warmup=20, steps=3),)))
    monkeypatch.setattr(package, "draw", lambda study, folder: ["ecdf.png"])
    monkeypatch.setenv("COLUMNS", "80")


@pytest.mark.usefixtures("quick")
def test_the_table_and_the_folder(run, tmp_path):
    folder = tmp_path / "study"
    result = run(
        *("study", "calibration", "--models", "logistic, linear", "--methods", "nuts,hmc", "--replicates", "20"),
        *("--draws", "15", "--out", folder, "--seed", "4"),
    )
    assert result.code == 0
    shown = " ".join(result.out.split())
    assert "Ranks of true values among 15 draws, 20 replicates" in shown
    assert sum(line.split()[-1:] in (["passes"], ["fails"]) for line in result.out.splitlines()) == 4
    assert "…" not in result.out
    assert f"figures and results.json: {folder}" in shown
    assert result.err.splitlines()[0].startswith("logistic, nuts: smallest p ")
    stored = json.loads((folder / "results.json").read_text())
    assert stored["command"] == (
        "posterity study calibration --out study --models logistic,linear --methods nuts,hmc --replicates 20 "
        "--draws 15 --seed 4"
    )
    assert [row["method"] for row in stored["results"]] == ["nuts", "hmc", "nuts", "hmc"]


@pytest.mark.usefixtures("quick")
def test_json_is_what_is_stored(run, tmp_path):
    options = ("--models", "logistic", "--methods", "mala", "--replicates", "20", "--draws", "15", "--json", "--quiet")
    result = run("study", "calibration", *options, "--out", tmp_path / "study")
    assert result.err == ""
    assert json.loads(result.out) == json.loads((tmp_path / "study" / "results.json").read_text())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--models", "lineal"), "Did you mean 'linear'"),
        (("--methods", ""), "No method is named"),
        (("--replicates", "4"), "more replicates"),
        (("--draws", "36"), "equal bins"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_computed(run, tmp_path, monkeypatch, options, message):
    monkeypatch.setattr(package, "calibration", lambda *args, **options: pytest.fail("computed"))
    result = run("study", "calibration", *options, "--out", tmp_path / "study")
    assert result.code == 2
    assert message in result.err


def test_the_names_in_the_help_are_those_of_the_study():
    assert set(MODELS) == set(models.MODELS)
    assert set(METHODS) == set(recipes.RECIPES)
