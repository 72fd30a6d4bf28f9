"""`posterity study uci`: the table, the folder, going on, and what is refused."""

import json

import pytest
from ucitable import write_energy

from posterity.cli.study_uci import NAMES
from posterity.datasets import UCI_REGRESSION
from posterity.studies import uci as package
from posterity.studies.uci.recipes import RECIPES

pytestmark = pytest.mark.cpu
TINY = ("--datasets", "energy", "--steps", "20", "--jobs", "1")


@pytest.fixture
def energy(tmp_path, monkeypatch):
    write_energy(tmp_path / "data", monkeypatch)
    monkeypatch.setattr(package, "draw", lambda study, folder: ["nll.png", "rmse.png"])


@pytest.mark.usefixtures("energy")
def test_the_table_the_folder_and_going_on(run, tmp_path):
    folder = tmp_path / "study"
    first = run("study", "uci", *TINY, "--splits", "2", "--out", folder, "--seed", "3")
    assert first.code == 0
    shown = " ".join(first.out.split())
    assert "energy MAP " in shown
    assert "MC dropout 2018 0.540 ± 0.010 1.250 ± 0.020" in shown
    assert "Deep ensembles 1.38" in shown
    assert "Laplace: NLL at least as good as MC dropout 2018 on 0 of 1" in shown
    assert f"figures and results.json: {folder}" in shown
    assert "…" not in first.out
    assert first.err.splitlines()[-1].startswith("2/2 energy split 1: MAP NLL ")
    stored = json.loads((folder / "results.json").read_text())
    assert stored["command"] == (
        f"posterity study uci --out {folder.name} --datasets energy --methods map,laplace --steps 20 --splits 2 "
        "--seed 3"
    )
    assert stored["figures"] == ["nll.png", "rmse.png"]
    assert stored["settings"]["seed"] == 3
    again = run("study", "uci", *TINY, "--out", folder, "--seed", "3")
    assert again.code == 0
    assert again.err.splitlines()[0] == "4 of 6 results are there already"
    more = json.loads((folder / "results.json").read_text())
    assert more["splits"][:4] == stored["splits"]
    assert len(more["splits"]) == 6


@pytest.mark.usefixtures("energy")
def test_json_is_what_is_stored_in_the_default_folder(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run("study", "uci", *TINY, "--splits", "1", "--methods", "map", "--json", "--quiet")
    assert result.code == 0
    assert result.err == ""
    assert json.loads(result.out) == json.loads((tmp_path / "study-uci" / "results.json").read_text())


@pytest.mark.usefixtures("energy")
def test_other_settings_in_the_same_folder_are_refused_in_one_line(run, tmp_path):
    words = ("study", "uci", "--datasets", "energy", "--splits", "1", "--methods", "map", "--out", tmp_path / "study")
    assert run(*words, "--steps", "20").code == 0
    result = run(*words, "--steps", "21")
    assert result.code == 4
    assert len(result.err.splitlines()) == 1
    assert "steps: 20, now 21" in result.err


@pytest.mark.usefixtures("energy")
def test_an_interrupt_leaves_with_its_code_and_keeps_what_is_done(run, tmp_path, monkeypatch):
    fit, fitted = package.runs.fit, []

    def interrupted(*words):
        if fitted:
            raise KeyboardInterrupt
        fitted.append(words)
        return fit(*words)

    monkeypatch.setattr(package.runs, "fit", interrupted)
    result = run("study", "uci", *TINY, "--out", tmp_path / "study")
    assert result.code == 130
    assert len(list((tmp_path / "study").rglob("split-*.json"))) == 2


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
    result = run("study", "uci", *words, "--out", tmp_path / "study")
    assert result.code == 2
    error, hint = result.err.splitlines()
    assert said in error
    assert hint.startswith("hint: ")
    assert not (tmp_path / "study").exists()


def test_the_help_names_the_data_sets_and_methods_there_are(run):
    assert NAMES == UCI_REGRESSION
    shown = run("study", "uci", "--help").out
    assert all(name in shown for name in (*NAMES, *RECIPES, f"Default: {package.Settings().steps}."))
