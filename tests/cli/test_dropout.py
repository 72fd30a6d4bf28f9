"""The method dropout on the command line, and its study."""

import json

import pytest

import posterity as po
from posterity.posteriors import Dropout
from posterity_studies.dropout import classification, enumeration, regression

pytestmark = pytest.mark.cpu
TINY = ("--hidden", "6", "--steps", "40", "--prior-scale", "1", "--device", "cpu")


def test_fit_keeps_a_posterior_of_masks(run, tmp_path):
    folder = tmp_path / "run"
    result = run("fit", "two-moons", "--out", folder, "--method", "dropout", "--dropout", "0.2", *TINY, "--json")
    assert result.code == 0
    document = json.loads(result.out)
    assert document["settings"]["dropout"] == 0.2
    assert document["network"]["dropout"] == 0.2
    q = po.load(folder, po.networks.MLP((2, 6, 2), activation="tanh", dropout=0.2))
    assert isinstance(q, Dropout)
    assert run("evaluate", folder, "--json").code == 0


def test_compare_takes_it_beside_others_on_one_network(run):
    result = run("compare", "two-moons", "--methods", "map,dropout", *TINY, "--json")
    assert result.code == 0
    document = json.loads(result.out)
    assert [row["method"] for row in document["methods"]] == ["map", "dropout"]
    assert document["network"]["dropout"] == 0.1
    assert run("plan", "two-moons", "--methods", "dropout", *TINY).code == 0
    plain = json.loads(run("compare", "two-moons", "--methods", "map", *TINY, "--json").out)
    assert plain["network"]["dropout"] == 0.0
    both = [next(row["test_nll"] for row in one["methods"] if row["method"] == "map") for one in (document, plain)]
    assert both[0] == both[1]  # dropout layers are off under MAP


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("two-moons", "--method", "map", "--dropout", "0.1"), "--dropout is for the method dropout"),
        (("two-moons", "--method", "dropout", "--dropout", "1"), "--dropout must be above 0 and below 1. Got 1."),
        (("two-moons", "--method", "dropout", "--dropout", "0"), "--dropout must be above 0 and below 1. Got 0."),
        (("line", "--method", "dropout"), "dropout needs hidden units to drop"),
    ],
)
def test_what_is_refused(run, tmp_path, words, message):
    result = run("fit", *words, "--out", tmp_path / "run")
    assert result.code == 2
    assert message in result.err
    assert not (tmp_path / "run").exists()


def test_the_study(study, monkeypatch):
    for module in (regression, classification, enumeration):
        monkeypatch.setattr(module, "STEPS", 30)
    monkeypatch.setattr(enumeration, "REPEATS", 20)
    found = study("dropout", seed=3, once=True)
    assert "MC dropout, learnt" in found.shown
    assert "0.5 0.1 4.96 7.66" in found.shown
    assert "all 32 masks" in found.shown
