"""`posterity study shift`: the table, the folder, what an interrupted study continues, and what is refused."""

import pytest
from noiseimages import noise_images

from posterity.numerics.random import Key
from posterity_studies.shift import study as module

pytestmark = pytest.mark.cpu
TOLD = "--held-out 20 --shifted 5 --networks mlp --methods map,ensemble,laplace --epochs 1e-09"


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """A few images of noise."""
    monkeypatch.setattr(module, "data_set", lambda name, seed: noise_images(name, (1, 28, 28), 84, 20))
    foreign = Key(1).uniform((20, 1, 28, 28))
    monkeypatch.setattr(module, "foreign_inputs", lambda name, like, count, seed: foreign.float())


def test_the_table_and_the_folder(study, monkeypatch):
    result = study("shift", *TOLD.split(), told=TOLD, seed=3, goes_on=True)
    assert "mnist, one hidden layer of 400, test images" in result.shown
    assert "Laplace, last layer" in result.shown
    assert "one hidden layer of 400, MAP: held-out NLL" in result.err
    assert [row["method"] for row in result.stored["rows"]] == ["map", "ensemble", "laplace"]
    assert result.stored["settings"]["seed"] == 3


def test_an_interrupted_study_continues(interrupted):
    resumed, there = interrupted("shift", *TOLD.split(), writer=module)
    assert sum("fit " in line for line in resumed) == 2
    assert not any("fit " in line for line in there)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--networks", "lenett"), "Did you mean 'lenet'?"),
        (("--data", "mnits"), "Did you mean 'mnist'?"),
        (("--methods", "mapp"), "Did you mean 'map'?"),
        (("--epochs", "0"), "--epochs"),
    ],
)
def test_what_cannot_be_used_is_refused(refused, words, said):
    assert said in refused("shift", *words)
