"""`posterity study hyperparameters`: the table, the folder, going on, and what is refused."""

import pytest
from ucitable import REFUSED, write_energy

from posterity_studies.hyperparameters import settings, study
from posterity_studies.hyperparameters import study as module

pytestmark = pytest.mark.cpu
TINY = ("--datasets", "energy", "--steps", "20", "--splits", "2", "--jobs", "1")


@pytest.fixture
def energy(tmp_path, monkeypatch):
    write_energy(tmp_path / "data", monkeypatch)
    monkeypatch.setattr(study, "ROUNDS", 2)


@pytest.mark.usefixtures("energy")
def test_the_table_and_the_folder(study):
    told = "--datasets energy --steps 20 --splits 2 --jobs 1"
    result = study("hyperparameters", *TINY, told=told, seed=3, goes_on=True)
    assert "best of grid variational EM difference splits" in result.shown
    assert "energy Laplace " in result.shown
    assert "energy, Laplace: variational EM is " in result.shown
    assert result.err.splitlines()[-2].startswith("4/4 energy, Laplace, grid, split 1: best NLL ")
    assert result.stored["fits"]
    assert result.stored["comparisons"]


@pytest.mark.usefixtures("energy")
def test_goes_on_where_it_was_interrupted(interrupted):
    resumed, there = interrupted("hyperparameters", *TINY, writer=module)
    assert resumed[0] == "2 of 4 results are there already"
    assert there == ["4 of 4 results are there already"]


@pytest.mark.parametrize(("words", "said"), REFUSED)
def test_what_cannot_be_used_is_refused(refused, words, said):
    assert said in refused("hyperparameters", *words)


def test_the_help_names_the_methods_and_defaults_there_are(run):
    assert tuple(study.RECIPES) == settings.METHODS
    shown = run("study", "hyperparameters", "--help").out
    assert all(name in shown for name in (*study.RECIPES, f"[default: {settings.Settings().steps}]"))
