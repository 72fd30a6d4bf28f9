"""The guard against slower steps: its comparison with earlier runs."""

import json

from benchmarkfiles import load

check = load("check")
ABOUT = {"date": "today"}


def never(names):
    raise AssertionError(f"measured again: {names}")


def test_a_row_is_slower_from_a_fifth_above_its_usual_ratio():
    history = [{"a": 1.0, "b": 2.0}, {"a": 1.1, "b": 2.0}, {"a": 5.0, "b": 2.0}]  # one noisy run does not count
    assert check.usual(history) == {"a": 1.1, "b": 2.0}
    assert check.slower(history, {"a": 1.31, "b": 2.39}) == []
    assert check.slower(history, {"a": 1.33, "b": 2.41}) == ["a", "b"]
    assert check.slower(history, {"a": float("nan"), "c": 99.0}) == ["a"]  # c is new


def test_only_the_last_runs_count():
    history = [{"a": 10.0}] * 20 + [{"a": 1.0}] * check.LAST
    assert check.slower(history, {"a": 1.25}) == ["a"]


def test_the_first_run_on_a_machine_records(tmp_path, capsys):
    path = tmp_path / "check.json"
    assert check.judged(path, "here", ABOUT, {"a": 1.0}, never) == []
    assert "No history on this machine" in capsys.readouterr().out
    assert check.judged(path, "there", ABOUT, {"a": 9.0}, never) == []
    stored = json.loads(path.read_text())
    assert {machine: [run["ratios"] for run in runs] for machine, runs in stored.items()} == {
        "here": [{"a": 1.0}],
        "there": [{"a": 9.0}],
    }


def test_a_row_fails_by_two_measurements_and_is_not_recorded(tmp_path):
    path = tmp_path / "check.json"
    check.judged(path, "here", ABOUT, {"a": 1.0, "b": 1.0}, never)
    before = path.read_text()
    assert check.judged(path, "here", ABOUT, {"a": 1.5, "b": 1.0}, lambda names: dict.fromkeys(names, 1.4)) == ["a"]
    assert path.read_text() == before
    assert check.judged(path, "here", ABOUT, {"a": 1.5, "b": 1.0}, lambda names: dict.fromkeys(names, 1.1)) == []
    assert json.loads(path.read_text())["here"][1]["ratios"] == {"a": 1.1, "b": 1.0}
