"""`posterity study temperature`: the tables, the folder, going on, and what is refused."""

import json

import pytest

from posterity.cli.study_temperature import temperature
from posterity.studies import groups
from posterity.studies import temperature as package
from posterity.studies.temperature import Settings

pytestmark = pytest.mark.cpu
TINY = (
    *("--data", "two-moons", "--widths", "3,5", "--etas", "0.1,1", "--seeds", "2", "--steps", "3", "--draws", "2"),
    *("--batch-size", "50", "--device", "cpu"),
)


@pytest.fixture(autouse=True)
def undrawn(monkeypatch):
    monkeypatch.setattr(package, "draw", lambda study, folder: ["eta.png", "tau.png"])


def test_the_table_the_folder_and_going_on(run, tmp_path):
    folder = tmp_path / "study"
    first = run("study", "temperature", *TINY, "--taus", "1e-3:1e-1:3", "--out", folder, "--seed", "3")
    assert first.code == 0
    assert "two-moons, one hidden layer, averaged over its neurons, width 5: 5 neurons" in first.out
    assert "…" not in first.out
    assert first.err.splitlines()[0] == "width 3: 10 fits together, 3 steps"
    stored = json.loads((folder / "results.json").read_text())
    assert stored["command"] == (
        f"posterity study temperature --out {folder.name} --data two-moons --net one-hidden --widths 3,5 --etas 0.1,1 "
        "--taus 1e-3:1e-1:3 --seeds 2 --method bayes-by-backprop --steps 3 --pixels raw --batch-size 50 "
        "--prior-variance 0.2 --draws 2 --device cpu --dtype float32 --seed 3"
    )
    assert stored["settings"]["taus"] == [0.001, 0.01, 0.1]
    again = run("study", "temperature", *TINY, "--taus", "1e-3:1e-1:3", "--out", folder, "--seed", "3", "--json")
    assert again.err.splitlines() == [f"width {width}: 10 of 10 fits are there already" for width in (3, 5)]
    assert json.loads(again.out)["fits"] == stored["fits"]
    other = run("study", "temperature", *TINY, "--out", folder, "--seed", "4")
    assert other.code == 4
    assert "other settings" in other.err


def test_an_interrupt_keeps_what_is_finished(run, tmp_path, monkeypatch):
    write, count = groups.write_result, 0

    def stopping(*words):
        nonlocal count
        count += 1
        if count == 3:
            raise KeyboardInterrupt
        write(*words)

    monkeypatch.setattr(groups, "write_result", stopping)
    assert run("study", "temperature", *TINY, "--out", tmp_path / "study").code == 130
    assert len(list((tmp_path / "study" / "runs").rglob("*.json"))) == 2
    result = run("study", "temperature", *TINY, "--out", tmp_path / "study")
    assert result.code == 0
    assert "width 3: takes up 4 fits that were interrupted" in result.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--data", "mnits"), "Did you mean 'mnist'?"),
        (("--net", "lenett"), "Did you mean 'lenet'?"),
        (("--method", "vi"), "Unknown method 'vi'"),
        (("--etas", "1,x"), "--etas must be numbers"),
        (("--etas", ","), "--etas must have at least one number"),
        (("--etas", "0"), "must be a positive number. Got 0.0."),
        (("--etas", "nan"), "must be a positive number. Got nan."),
        (("--taus", "-1"), "must be a positive number. Got -1.0."),
        (("--taus", "inf"), "must be a positive number. Got inf."),
        (("--taus", "1:0.1:3"), "low must be below high"),
        (("--taus", "0.1:1:x"), "--taus must be numbers"),
        (("--widths", "0"), "Settings.widths must be a positive whole number. Got 0."),
        (("--widths", "1.5"), "--widths must be whole numbers"),
        (("--widths", ""), "--widths must have at least one number"),
        (("--rows", "1000"), "rows must be at most the 458"),
        (("--ood", "mnist"), "Use ood 'uniform'"),
        (("--seeds", "0"), "seeds must be a positive whole number. Got 0."),
        (("--seed", "-1"), "Got -1."),
        (("--device", "gpu"), "Unknown device 'gpu'."),
    ],
)
def test_what_cannot_be_used_is_said_in_one_line_and_a_hint(run, tmp_path, words, said):
    result = run("study", "temperature", *TINY, *words, "--out", tmp_path / "study")
    assert result.code == 2
    error, hint = result.err.splitlines()
    assert said in error
    assert hint.startswith("hint: ")
    assert not (tmp_path / "study").exists()


def test_a_network_that_needs_widths_says_so(run, tmp_path):
    result = run("study", "temperature", "--data", "two-moons", "--out", tmp_path / "study")
    assert result.code == 2
    assert "The network 'one-hidden' needs widths" in result.err


def test_data_that_are_absent_are_told_where_to_go(run, tmp_path, monkeypatch):
    monkeypatch.setenv("POSTERITY_DATA", str(tmp_path / "nothing"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    result = run("study", "temperature", "--widths", "3", "--out", tmp_path / "study")
    assert result.code == 3
    assert "Data set 'mnist' was not found. Looked for a folder 'mnist' in " in result.err
    assert "POSTERITY_DATA" in result.err
    assert "Traceback" not in result.err


def test_the_defaults_are_those_of_the_study():
    usual = Settings(widths=(50,))
    names = ("data", "net", "seeds", "method", "pixels", "prior_variance", "draws", "dtype", "seed")
    given = dict(zip(temperature.__code__.co_varnames, temperature.__defaults__, strict=False))
    assert {name: given[name] for name in names} == {name: getattr(usual, name) for name in names}
