"""`posterity study uci`: the table, the folder, going on, and what is refused."""

import json

import pytest
from ucitable import REFUSED, write_energy

from posterity.datasets import UCI_REGRESSION
from posterity_studies.uci import runs, settings
from posterity_studies.uci.recipes import RECIPES

pytestmark = pytest.mark.cpu
TINY = ("--datasets", "energy", "--steps", "20", "--jobs", "1")


@pytest.fixture
def energy(tmp_path, monkeypatch):
    write_energy(tmp_path / "data", monkeypatch)


@pytest.mark.usefixtures("energy")
def test_the_table_and_the_folder(study, run):
    told = "--datasets energy --steps 20 --splits 2 --jobs 1"
    result = study("uci", *TINY, "--splits", "2", told=told, seed=3, goes_on=True)
    assert "energy MAP " in result.shown
    assert "MC dropout 2018 0.540 ± 0.010 1.250 ± 0.020" in result.shown
    assert "Deep ensembles 1.38" in result.shown
    assert "Laplace: NLL at least as good as MC dropout 2018 on 0 of 1" in result.shown
    assert result.err.splitlines()[-2].startswith("2/2 energy split 1: MAP NLL ")
    assert result.stored["settings"]["seed"] == 3
    more = run("study", "uci", *TINY, "--seed", "3", "--json")
    assert more.code == 0
    assert more.err.splitlines()[0] == "4 of 6 results are there already"
    splits = json.loads(more.out)["splits"]
    assert splits[:4] == result.stored["splits"]
    assert len(splits) == 6


@pytest.mark.usefixtures("energy")
def test_goes_on_where_it_was_interrupted(interrupted):
    resumed, there = interrupted("uci", *TINY, writer=runs)
    assert resumed[0] == "2 of 6 results are there already"
    assert there == ["6 of 6 results are there already"]


@pytest.mark.parametrize(("words", "said"), REFUSED)
def test_what_cannot_be_used_is_refused(refused, words, said):
    assert said in refused("uci", *words)


def test_the_help_names_the_data_sets_and_methods_there_are(run):
    assert settings.DATA_SETS == UCI_REGRESSION
    assert tuple(RECIPES) == settings.METHODS
    shown = run("study", "uci", "--help").out
    assert all(name in shown for name in (*UCI_REGRESSION, *RECIPES, f"[default: {settings.Settings().steps}]"))
