"""`posterity study hyperparameters`: the table, the folder, and what is refused."""

import json

import pytest
from ucitable import write_energy

from posterity.cli.study_hyperparameters import NAMES
from posterity.studies import hyperparameters as package
from posterity.studies.hyperparameters import recipes

pytestmark = pytest.mark.cpu
TINY = ("--datasets", "energy", "--steps", "20", "--jobs", "1")


@pytest.fixture
def energy(tmp_path, monkeypatch):
    write_energy(tmp_path / "data", monkeypatch)
    monkeypatch.setattr(package, "draw", lambda study, folder: ["grid.png"])
    monkeypatch.setattr(recipes, "ROUNDS", 2)


@pytest.mark.usefixtures("energy")
def test_the_table_the_folder_and_going_on(run, tmp_path):
    folder = tmp_path / "study"
    first = run("study", "hyperparameters", *TINY, "--splits", "2", "--out", folder, "--seed", "3")
    assert first.code == 0
    shown = " ".join(first.out.split())
    assert "best of grid variational EM difference splits" in shown
    assert "energy Laplace " in shown
    assert "energy, Laplace: variational EM is " in shown
    assert f"figures and results.json: {folder}" in shown
    assert "…" not in first.out
    assert first.err.splitlines()[-1].startswith("4/4 energy, Laplace, grid, split 1: best NLL ")
    stored = json.loads((folder / "results.json").read_text())
    assert stored["command"] == (
        f"posterity study hyperparameters --out {folder.name} --datasets energy --methods laplace --steps 20 "
        "--splits 2 --seed 3"
    )
    assert stored["figures"] == ["grid.png"]
    again = run("study", "hyperparameters", *TINY, "--splits", "2", "--out", folder, "--seed", "3", "--json")
    assert again.err.splitlines() == ["4 of 4 results are there already"]
    document = json.loads(again.out)
    assert document["fits"] == stored["fits"]
    assert document["comparisons"] == stored["comparisons"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--datasets", "enrgy"), "Unknown data set 'enrgy'. Did you mean 'energy'?"),
        (("--methods", "laplas"), "Unknown method 'laplas'. Did you mean 'laplace'?"),
        (("--methods", ","), "No method was named."),
        (("--splits", "0"), "splits must be a positive whole number. Got 0."),
        (("--jobs", "0"), "jobs must be a positive whole number. Got 0."),
        (("--steps", "0"), "steps must be a positive whole number. Got 0."),
        (("--seed", "-1"), "Got -1."),
    ],
)
def test_what_cannot_be_used_is_said_in_one_line_and_a_hint(run, tmp_path, words, said):
    result = run("study", "hyperparameters", *words, "--out", tmp_path / "study")
    assert result.code == 2
    error, hint = result.err.splitlines()
    assert said in error
    assert hint.startswith("hint: ")
    assert not (tmp_path / "study").exists()


def test_the_help_names_the_methods_and_defaults_there_are(run):
    assert tuple(NAMES.split(",")) == package.DATA_SETS
    shown = run("study", "hyperparameters", "--help").out
    assert all(name in shown for name in (*recipes.RECIPES, f"Default: {package.STEPS}."))
