"""`posterity study images`: the tables, the folder, going on, and what is refused."""

import json

import pytest
import torch

from posterity.cli.study_images import images
from posterity.datasets import DataSet, LabelledData
from posterity.studies import images as package
from posterity.studies.images import NETWORKS, Settings, protocol

pytestmark = pytest.mark.cpu
TINY = ("--networks", "mlp", "--etas", "1,0.1", "--seeds", "2", "--steps", "2")


@pytest.fixture(autouse=True)
def small(monkeypatch):
    generator = torch.Generator().manual_seed(0)

    def part(count):
        labels = torch.randint(10, (count,), generator=generator)
        return LabelledData(torch.rand((count, 1, 28, 28), generator=generator), labels)

    data = DataSet("mnist", "classification", part(6000), part(30), tuple("0123456789"))
    monkeypatch.setattr(protocol, "mnist", lambda name: data)
    monkeypatch.setattr(package, "draw", lambda study, folder: ["eta.png", "scores.png"])


def test_the_table_the_folder_and_going_on(run, tmp_path):
    folder = tmp_path / "study"
    first = run("study", "images", *TINY, "--out", folder, "--seed", "3")
    assert first.code == 0
    shown = " ".join(first.out.split())
    assert "mnist, one hidden layer of 400, test images" in shown
    assert "MeanField, chosen" in shown
    assert "over 2 seeds; eta chosen by the NLL of the first seed on 5000 held-out training images." in shown
    assert "…" not in first.out
    assert first.err.splitlines()[0].startswith("one hidden layer of 400, MAP, seed 0: held out error, % ")
    stored = json.loads((folder / "results.json").read_text())
    assert stored["command"] == (
        f"posterity study images --out {folder.name} --data mnist --networks mlp --etas 1,0.1 --steps 2 --seeds 2 "
        "--device cpu --seed 3"
    )
    assert stored["settings"]["seed"] == 3
    assert stored["machine"]["threads"] >= 1
    again = run("study", "images", *TINY, "--out", folder, "--seed", "3", "--json")
    assert again.code == 0
    assert all("there already" in line for line in again.err.splitlines() if "held out" in line)
    assert json.loads(again.out)["fits"] == stored["fits"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--networks", "lenett"), "Did you mean 'lenet'?"),
        (("--data", "mnits"), "Did you mean 'mnist'?"),
        (("--etas", "1,x"), "--etas must be numbers"),
        (("--etas", ","), "at least one number"),
        (("--seeds", "0"), "seeds must be a positive whole number. Got 0."),
        (("--seed", "-1"), "Got -1."),
    ],
)
def test_what_cannot_be_used_is_said_in_one_line_and_a_hint(run, tmp_path, words, said):
    result = run("study", "images", *words, "--out", tmp_path / "study")
    assert result.code == 2
    error, hint = result.err.splitlines()
    assert said in error
    assert hint.startswith("hint: ")
    assert not (tmp_path / "study").exists()


def test_the_defaults_are_those_of_the_study():
    names, etas, seeds = (images.__defaults__[place] for place in (1, 2, 3))
    assert tuple(names.split(",")) == tuple(NETWORKS)
    assert tuple(float(eta) for eta in etas.split(",")) == Settings().etas
    assert seeds == Settings().seeds
