"""`posterity compare --executor`: stages of methods as tasks, here sent as bytes within this process."""

import json
import pickle

import pytest
from clitables import rows

from posterity.cli.frame import outcomes, tasks
from posterity.errors import Diverged
from posterity.inference import Executor
from posterity.scale.parcels import done, opened

pytestmark = pytest.mark.cpu
WORDS = ("compare", "line", "--hidden", "6", "--steps", "40", "--prior-scale", "1", "--device", "cpu")
METHODS = ("--methods", "laplace,swag,ensemble")
RUN = tasks.run_stage


class Sent(Executor):
    """Sends work as bytes, and interrupts the rounds of work after so many pieces."""

    def __init__(self, most=100):
        self.most, self.rounds = most, []

    def each(self, work):
        self.rounds.append(list(work))
        for name, item in work.items():
            if not self.most:
                raise KeyboardInterrupt
            self.most -= 1
            yield name, opened(done(pickle.dumps(item)))


def failing_map(name, *arguments, **options):
    if name == "map":
        error = Diverged("loss is not finite at step 4.", step=4, tensor="loss")
        error.add_note("try a smaller --step-size than 0.01.")
        raise error
    return RUN(name, *arguments, **options)


@pytest.fixture
def executor(monkeypatch):
    sent = Sent()
    monkeypatch.setattr(outcomes, "executor_named", lambda word: sent)
    return sent


def without_seconds(out):
    document = json.loads(out)
    for row in (*document["methods"], *document["baselines"]):
        assert row.pop("seconds") >= 0
    return document


def test_stages_are_tasks_and_have_the_numbers_of_those_in_turn(run, executor):
    wanted = run(*WORDS, *METHODS, "--json")
    assert executor.rounds == []
    result = run(*WORDS, *METHODS, "--json", "--executor", "processes")
    assert executor.rounds == [["map", "ensemble"], ["map, laplace", "map, swag"]]
    assert without_seconds(result.out) == without_seconds(wanted.out)
    told = [line.partition(",")[0] for line in result.err.splitlines() if line.endswith(" s")]
    assert told == ["MAP", "Ensemble", "Laplace", "SWAG"]


def test_a_stage_that_fails_is_said_here_and_ends_only_what_needs_it(run, executor, monkeypatch):
    monkeypatch.setattr(tasks, "run_stage", failing_map)
    result = run(*WORDS, *METHODS, "--executor", "processes")
    assert result.code == 0
    assert executor.rounds == [["map", "ensemble"], []]
    assert list(rows(result.out)) == ["mean", "linear", "Laplace (MAP failed)", "SWAG (MAP failed)", "Ensemble"]
    assert result.err.count("error: MAP: loss is not finite") == 1
    assert "hint: try a smaller --step-size" in result.err


def test_an_interruption_keeps_what_is_finished(run, executor):
    executor.most = 3
    result = run(*WORDS, *METHODS, "--executor", "processes")
    assert result.code == 130
    assert list(rows(result.out)) == ["mean", "linear", "Laplace", "SWAG (not run)", "Ensemble"]
    executor.most = 0
    assert run(*WORDS, *METHODS, "--executor", "processes").code == 130
