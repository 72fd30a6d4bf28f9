"""`posterity study calibration`: the table, the folder, and what is refused."""

import pytest

from posterity.methods import HMC
from posterity_studies.calibration import calibrate
from posterity_studies.calibration import study as module
from posterity_studies.calibration.settings import METHODS, MODELS

pytestmark = pytest.mark.cpu


def test_the_table_and_the_folder(study, monkeypatch):
    monkeypatch.setattr(module, "RECIPES", dict.fromkeys(METHODS, lambda model: (HMC(warmup=20, steps=3),)))
    result = study(
        *("calibration", "--models", "logistic, linear", "--methods", "nuts,hmc", "--replicates", "20"),
        *("--draws", "15"),
        told="--models logistic,linear --methods nuts,hmc --replicates 20 --draws 15",
        seed=4,
    )
    assert "Ranks of true values among 15 draws, 20 replicates" in result.shown
    assert sum(line.split()[-1:] in (["passes"], ["fails"]) for line in result.out.splitlines()) == 4
    assert result.err.splitlines()[0].startswith("logistic, nuts: smallest p ")
    assert [row["method"] for row in result.stored["results"]] == ["nuts", "hmc", "nuts", "hmc"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--models", "lineal"), "Did you mean 'linear'"),
        (("--methods", ""), "--methods must name at least one. Got none."),
        (("--replicates", "4"), "more replicates"),
        (("--draws", "36"), "equal bins"),
    ],
)
def test_what_cannot_be_is_refused(refused, options, message):
    assert message in refused("calibration", *options)


def test_the_names_in_the_help_are_those_of_the_study():
    assert set(MODELS) == set(calibrate.MODELS)
    assert set(METHODS) == set(module.RECIPES)
