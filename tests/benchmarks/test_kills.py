"""What the kill tests compare, and that they see a difference."""

import json
import signal

import pytest
from benchmarkfiles import load

kills = load("kills")


def test_results_of_a_study_are_compared_without_their_seconds(tmp_path):
    def result(**values):
        path = tmp_path / "energy" / "split-00.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"identity": {}, "scores": {"nll": 1.0}, "seconds": 2.0, **values}))
        (tmp_path / "list.json").write_text("[]")
        return kills.content(tmp_path)

    assert result() == result(seconds=3.0)
    assert result() != result(scores={"nll": 1.1})
    assert set(result()) == {"energy/split-00.json", "list.json"}


class Runs:
    """Stands for commands: each is killed where it may be, and run to its end it leaves what `results` has next."""

    def __init__(self, results):
        self.results = iter(results)

    def run(self, words, kill_after=None):
        if kill_after is not None:
            return -signal.SIGKILL
        words[-1].mkdir()
        (words[-1] / "result").write_text(next(self.results))
        return 0

    def close(self):
        pass


@pytest.mark.parametrize(("results", "differ"), [("AAAAA", 0), ("AABAA", 1)])
def test_a_run_that_ends_otherwise_is_counted(tmp_path, monkeypatch, results, differ):
    monkeypatch.setattr(kills, "Spawner", lambda warm: Runs(results))
    tally = kills.killed_commands(lambda folder: ["fit", folder], 4, tmp_path)
    assert tally.kills == 4
    assert tally.folders > 1
    assert tally.differ == differ
