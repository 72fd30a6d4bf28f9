"""`posterity study images`: the tables, the folder, going on, and what is refused."""

import pytest
from noiseimages import noise_images

from posterity_studies.images import settings, study
from posterity_studies.images import study as module

pytestmark = pytest.mark.cpu
TINY = ("--networks", "mlp", "--etas", "1,0.1", "--seeds", "2", "--steps", "2", "--draws", "2")


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """A few images."""
    monkeypatch.setattr(study, "mnist", lambda name: noise_images(name, (1, 28, 28), 6000, 30))


def test_the_table_and_the_folder(study):
    told = "--networks mlp --etas 1,0.1 --seeds 2 --steps 2 --draws 2"
    result = study("images", *TINY, told=told, seed=3, goes_on=True)
    assert "mnist, one hidden layer of 400, test images" in result.shown
    assert "MeanField, chosen" in result.shown
    assert "over 2 seeds; eta chosen by the NLL of the first seed on 5000 held-out training images." in result.shown
    assert result.err.splitlines()[0].startswith("one hidden layer of 400, MAP, seed 0: held out error, % ")
    assert result.stored["settings"]["seed"] == 3
    assert result.stored["threads"] >= 1
    assert result.stored["fits"]


def test_goes_on_where_it_was_interrupted(interrupted):
    resumed, there = interrupted("images", *TINY, writer=module)
    assert [line.endswith("there already") for line in resumed if "held out" in line][:3] == [True, True, False]
    assert {line.endswith("there already") for line in there if "held out" in line} == {True}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--networks", "lenett"), "Did you mean 'lenet'?"),
        (("--data", "mnits"), "Did you mean 'mnist'?"),
        (("--etas", "1,x"), "--etas must be numbers"),
        (("--etas", ","), "at least one number"),
        (("--seeds", "0"), "seeds must be a positive whole number. Got 0."),
    ],
)
def test_what_cannot_be_used_is_refused(refused, words, said):
    assert said in refused("images", *words)


def test_the_names_of_the_options_are_those_of_the_study():
    assert settings.Settings().networks == tuple(study.NETWORKS)
