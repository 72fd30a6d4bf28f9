"""`posterity study penalties`: the table, the folder, going on, processes, and what is refused."""

import json

import pytest
import torch

from posterity.cli.study_penalties import penalties
from posterity.datasets import DataSet, LabelledData
from posterity.numerics.random import Key
from posterity.studies import groups
from posterity.studies import penalties as package

pytestmark = pytest.mark.cpu
TINY = (
    *("--penalties", "l2,rows", "--ratios", "0.1,1", "--seeds", "1", "--epochs", "1", "--rows", "20", "--width", "1"),
    *("--batch-size", "10", "--held-out", "20", "--device", "cpu"),
)


@pytest.fixture(autouse=True)
def undrawn(monkeypatch):
    monkeypatch.setattr(package, "draw", lambda study, folder: ["accuracy.png"])


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """A handful of test images: those of the data set take long."""
    from posterity.studies.penalties import protocol

    read = protocol.mnist

    def few(name="mnist"):
        whole = read(name=name)
        return type(whole)(
            whole.name,
            whole.task,
            _first(whole.train, 100),
            _first(whole.test, 20),
            whole.classes,
        )

    def coloured():
        one = Key(0).normal((60, 3, 32, 32), torch.float32)
        rows = LabelledData(one, torch.arange(60) % 10)
        return DataSet("cifar-10", "classification", rows, rows, tuple("0123456789"))

    monkeypatch.setattr(protocol, "mnist", few)
    monkeypatch.setattr(protocol, "cifar10", coloured)


def _first(rows, count):
    return type(rows)(rows.inputs[:count], rows.targets[:count])


def test_the_table_the_folder_and_going_on(run, tmp_path):
    folder = tmp_path / "study"
    first = run("study", "penalties", *TINY, "--no-augment", "--out", folder, "--seed", "3")
    assert first.code == 0
    assert "mnist, small convolutional network of width 1, n = 20: test accuracy in per cent" in first.out
    assert "rows, bayesian" in first.out
    assert "…" not in first.out
    assert first.err.splitlines()[0] == "l2: 4 fits together, 2 steps"
    stored = json.loads((folder / "results.json").read_text())
    assert stored["command"] == (
        f"posterity study penalties --out {folder.name} --data mnist --net cvnn --penalties l2,rows "
        "--setups usual,bayesian --ratios 0.1,1 --seeds 1 --epochs 1 --rows 20 --width 1 --batch-size 10 "
        "--held-out 20 --precision float32 --jobs 1 --device cpu --seed 3 --no-augment"
    )
    again = run("study", "penalties", *TINY, "--no-augment", "--out", folder, "--seed", "3", "--json")
    assert again.err.splitlines() == [f"{name}: 4 of 4 fits are there already" for name in ("l2", "rows")]
    assert json.loads(again.out)["fits"] == stored["fits"]
    other = run("study", "penalties", *TINY, "--out", folder, "--seed", "4")
    assert other.code == 4
    assert "other settings" in other.err


def test_the_numbers_of_the_authors_stand_beside(run, tmp_path):
    result = run("study", "penalties", *TINY, "--data", "cifar-10", "--penalties", "rows", "--out", tmp_path / "study")
    assert result.code == 0
    theirs = result.out.partition("As the authors had it")[2]
    assert "rows, bayesian        88.67          87.45                   100" in theirs
    assert "One seed. lambda* has the best accuracy on 20 held-out training rows." in result.out


def test_an_interrupt_keeps_what_is_finished(run, tmp_path, monkeypatch):
    write, count = groups.write_result, 0

    def stopping(*words):
        nonlocal count
        count += 1
        if count == 3:
            raise KeyboardInterrupt
        write(*words)

    monkeypatch.setattr(groups, "write_result", stopping)
    assert run("study", "penalties", *TINY, "--out", tmp_path / "study").code == 130
    assert len(list((tmp_path / "study" / "runs").rglob("*.json"))) == 2
    result = run("study", "penalties", *TINY, "--out", tmp_path / "study")
    assert result.code == 0
    assert "l2: takes up 4 fits that were interrupted" in result.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--data", "mnits"), "Did you mean 'mnist'?"),
        (("--net", "vgg"), "Did you mean 'vgg19'?"),
        (("--penalties", "l3"), "Unknown penalty 'l3'"),
        (("--penalties", ","), "at least one penalty"),
        (("--setups", "bayes"), "Unknown setup 'bayes'"),
        (("--ratios", "1,x"), "--ratios must be numbers"),
        (("--ratios", "0"), "must be a positive number. Got 0.0."),
        (("--lambdas", "-1"), "must be a positive number. Got -1.0."),
        (("--lambdas", "inf"), "must be a positive number. Got inf."),
        (("--rows", "1000"), "rows must be at most the 80"),
        (("--held-out", "100"), "must leave some of the 100"),
        (("--precision", "float16"), "precision"),
        (("--jobs", "0"), "--jobs must be a positive whole number. Got 0."),
        (("--seed", "-1"), "Got -1."),
        (("--device", "gpu"), "Unknown device 'gpu'."),
    ],
)
def test_what_cannot_be_used_is_said_in_one_line_and_a_hint(run, tmp_path, words, said):
    result = run("study", "penalties", *TINY, *words, "--out", tmp_path / "study")
    assert result.code == 2
    assert said in result.err
    assert "Traceback" not in result.err
    assert not (tmp_path / "study").exists()


def test_absent_data_are_told(run, tmp_path, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setenv("POSTERITY_DATA", str(tmp_path / "nowhere"))
    result = run("study", "penalties", *TINY, "--data", "cifar-10", "--out", tmp_path / "study")
    assert result.code == 3
    assert "cifar-10" in result.err


def test_defaults_are_those_of_the_settings():
    import inspect

    given = {name: one.default for name, one in inspect.signature(penalties).parameters.items()}
    settings = package.Settings()
    for name in (
        "data",
        "net",
        "seeds",
        "epochs",
        "rows",
        "width",
        "batch_size",
        "step_size",
        "batch_norm",
        "augment",
        "held_out",
    ):
        assert given[name] == getattr(settings, name)
    assert tuple(given["penalties"].split(",")) == settings.penalties
    assert tuple(given["setups"].split(",")) == settings.setups
