import logging
import os
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
from contracts.cases import ROWS, numbers, regression
from contracts.test_methods import same_bits
from executorcases import FIT, FLOAT64, assert_same, mixed_tasks, tasks
from killedworkers import Deadly, die, diverge
from torch import nn

import posterity as po
from posterity.datasets import LabelledData
from posterity.errors import BadFolder, Diverged, PosterityError
from posterity.inference import Batched, Executor, Processes, Sequential, Task
from posterity.inference.executor import in_halves, largest_group
from posterity.likelihoods import Gaussian
from posterity.methods import MAP, Conjugate, Laplace
from posterity.priors import Normal
from posterity.scale.parcels import Lost

pytestmark = pytest.mark.cpu


def test_errors_are_named_and_the_others_kept(caplog):
    with caplog.at_level(logging.WARNING, "posterity"):
        outcomes = Sequential().run(mixed_tasks())
    assert [outcome.name for outcome in outcomes if outcome.posterior is not None] == ["map", "laplace", "mean field"]
    assert outcomes[3].error.startswith("ValueError: Conjugate needs a Joint with a Gaussian likelihood")
    assert "The loss is not finite at step" in outcomes[4].error
    assert any(r.getMessage().startswith("impossible: ValueError: Conjugate") for r in caplog.records)


def test_processes_give_the_bits_of_one_after_the_other():
    given = mixed_tasks()
    assert_same(Sequential().run(given), Processes(2).run(given))


def test_members_give_what_one_after_the_other_gives():
    given = tasks(4)
    alone, together = Sequential().run(given), Batched().run(given)
    for one, two in zip(alone, together, strict=True):
        assert one.name == two.name
        torch.testing.assert_close(one.posterior.theta, two.posterior.theta, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(one.trace["loss"], two.trace["loss"], rtol=1e-10, atol=1e-10)
        assert one.posterior.joint.likelihood.scale == pytest.approx(two.posterior.joint.likelihood.scale, rel=1e-10)


def test_splits_of_equal_shapes_run_as_members(monkeypatch):
    joint, (x, y) = regression(FLOAT64), numbers(FLOAT64)
    rows = [(x.roll(k, 0), y.roll(k, 0) + 0.1 * k) for k in range(3)]
    weighted = [(x, y, torch.linspace(0.5, 1.5, ROWS, dtype=FLOAT64).roll(k)) for k in range(2)]
    given = [Task(f"fit {k}", FIT, joint, part, seed=k) for k, part in enumerate([*rows, *weighted])]
    given[1] = replace(given[1], data=LabelledData(*rows[1]))
    alone, members = Sequential().run(given), []
    inner = Task.run
    monkeypatch.setattr(Task, "run", lambda task: members.append(len(task.start)) or inner(task))
    together = Batched().run(given)
    assert members == [3, 2]
    for one, two in zip(alone, together, strict=True):
        torch.testing.assert_close(one.posterior.theta, two.posterior.theta, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(one.trace["loss"], two.trace["loss"], rtol=1e-10, atol=1e-10)


def test_what_cannot_be_batched_goes_one_by_one():
    given = [*mixed_tasks(), *tasks(2, Laplace(tuning=None))]
    alone, together = Sequential().run(given), Batched().run(given)
    assert_same(alone[:5], together[:5])
    for one, two in zip(alone[5:], together[5:], strict=True):
        torch.testing.assert_close(one.posterior.point(), two.posterior.point())


def test_one_of_a_batch_that_diverges_does_not_take_the_others_with_it(caplog):
    given = tasks(3)
    bad = torch.full_like(given[0].start, 1e200)
    given[1] = Task("bad", FIT, given[0].joint, given[0].data, bad, seed=1)
    with caplog.at_level(logging.INFO, "posterity"):
        outcomes = Batched().run(given)
    assert [bool(outcome.error) for outcome in outcomes] == [False, True, False]
    assert "3 fits go in halves, because together they failed" in caplog.text
    assert same_bits(outcomes[2].posterior, Sequential().run(given[2:])[0].posterior)


@pytest.mark.parametrize("executor", [Sequential(), Batched()], ids=["sequential", "batched"])
def test_a_folder_is_gone_on_with(executor: Executor, tmp_path, monkeypatch):
    given = tasks(3)
    first = executor.run(given[:2], tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.json")}
    ran = []
    inner = type(executor)._outcomes

    def noted(self, some):
        ran.extend(task.name for task in some)
        return inner(self, some)

    monkeypatch.setattr(type(executor), "_outcomes", noted)
    again = executor.run(given, tmp_path)
    assert ran == ["fit 2"]
    assert_same(first, again[:2])
    assert all(path.stat().st_mtime_ns == stamp for path, stamp in before.items())
    executor.run(given, tmp_path)
    assert ran == ["fit 2"]


def test_a_failed_task_is_tried_again(tmp_path):
    (task,) = tasks(1)
    broken = Task(task.name, Conjugate(), task.joint, task.data, seed=task.seed)
    assert Sequential().run([broken], tmp_path)[0].error
    assert Sequential().run([task], tmp_path)[0].posterior is not None


@pytest.mark.parametrize("change", ["method", "seed", "data", "start", "model"])
def test_a_folder_of_other_tasks_is_refused(change, tmp_path):
    (task,) = tasks(1)
    Sequential().run([task], tmp_path)
    x, y = task.data
    joint = po.Joint(task.joint.network, Gaussian(0.3, learn=True), Normal(0.8), ROWS)
    changed = {
        "method": Task(task.name, MAP(steps=8, batch_size=6), task.joint, task.data, task.start),
        "seed": Task(task.name, FIT, task.joint, task.data, task.start, seed=9),
        "data": Task(task.name, FIT, task.joint, (x, y + 1), task.start),
        "start": Task(task.name, FIT, task.joint, task.data, task.start + 1),
        "model": Task(task.name, FIT, joint, task.data, task.start),
    }
    with pytest.raises(BadFolder, match=f"holds another fit than 'fit 0': its {change} differs"):
        Sequential().run([changed[change]], tmp_path)


def deadly(folder, times):
    folder.mkdir()
    joint = po.Joint(Deadly(folder, times).double(), Gaussian(0.3), Normal(), ROWS)
    return Task("deadly", FIT, joint, numbers(FLOAT64))


def test_a_killed_worker_is_begun_again(tmp_path, caplog):
    given = [deadly(tmp_path / "kills", 1), *tasks(2)]
    with caplog.at_level(logging.WARNING, "posterity"):
        outcomes = Processes(1).run(given)
    assert "a worker was killed" in caplog.text
    assert_same(Sequential().run(given), outcomes)


def test_a_task_that_always_kills_is_named_and_the_others_kept(tmp_path):
    outcomes = Processes(1, retries=0).run([deadly(tmp_path / "kills", 99), *tasks(1)])
    assert outcomes[0].error.startswith("its process was killed, 2 times")
    assert outcomes[1].posterior is not None


def test_workers_end_with_a_process_that_is_killed(tmp_path):
    program = (
        "import killedworkers, functools, pathlib; from posterity.inference import Processes\n"
        "if __name__ == '__main__':\n"
        f"    work = functools.partial(killedworkers.wait, pathlib.Path({str(tmp_path)!r}))\n"
        "    list(Processes(1).results({'work': work}))\n"
    )
    (tmp_path / "program.py").write_text(program)
    search = os.pathsep.join(path for path in sys.path if path)
    first = subprocess.Popen([sys.executable, tmp_path / "program.py"], env={**os.environ, "PYTHONPATH": search})
    try:
        worker = wait_for(lambda: [int(path.name) for path in (tmp_path / "workers").glob("*")])[0]
    finally:
        first.kill()
        first.wait()
    assert wait_for(lambda: not Path(f"/proc/{worker}").exists())


def wait_for(result, seconds=60.0):
    end = time.monotonic() + seconds
    while not (value := result()):
        assert time.monotonic() < end
        time.sleep(0.02)
    return value


def test_named_work_runs_in_processes_of_one_thread_and_is_begun_again(tmp_path):
    work = {str(index): partial(die, tmp_path, 1) for index in range(3)}
    assert list(Processes(2, threads=1).results(work)) == [1, 1, 1]
    assert len(list(tmp_path.iterdir())) == 1  # one was killed
    assert list(Sequential().results(work)) == [torch.get_num_threads()] * 3


def test_work_that_fails_or_is_lost_ends_all_of_it(monkeypatch):
    with pytest.raises(PosterityError, match="seed 3: The loss is NaN") as caught:
        list(Processes(2).results({"one": diverge, "two": diverge}))
    assert caught.value.exit_code == Diverged.exit_code
    monkeypatch.setattr(Processes, "each", lambda self, work: iter([("two", Lost("its process was killed"))]))
    with pytest.raises(PosterityError, match="two: its process was killed"):
        list(Processes(2).results({"one": diverge, "two": diverge}))


def test_a_group_that_fails_goes_in_halves_until_one_is_alone():
    tried, lines = [], []

    def fit(items):
        tried.append(items)
        if 4 in items:
            raise ValueError("four\nand more")
        return sum(items)

    results = list(in_halves([1, 2, 3, 4, 5], fit, ValueError, lines.append))
    assert tried == [[1, 2, 3, 4, 5], [1, 2, 3], [4, 5], [4], [5]]
    assert [items for items, _ in results] == [[1, 2, 3], [4], [5]]
    assert (results[0][1], results[2][1]) == (6, 5)
    assert isinstance(results[1][1], ValueError)
    assert lines[0] == "5 fits go in halves, because together they failed: four"
    with pytest.raises(ValueError, match="four"):
        list(in_halves([4], fit, TypeError, lines.append))


def test_groups_are_as_large_as_memory_allows():
    lines = []
    assert largest_group(range(9), 9, lambda items: len(items) <= 4, lines.append) == 3
    assert lines == ["9 fits run in groups of 3: memory has no room for more at once"]
    assert largest_group(range(9), 6, lambda items: True, lines.append) == 6
    assert largest_group(range(9), 9, lambda items: False, lambda line: None) == 1


def test_what_cannot_travel_is_named():
    density = po.Density(lambda w: -w.square().sum(), {"w": (2,)})
    (outcome,) = Processes(1).run([Task("own density", MAP(steps=2), density, None)])
    assert "it cannot be sent to a process" in outcome.error
    assert "Define its parts in a file" in outcome.error


def test_what_a_process_cannot_read_is_named_and_the_others_kept(monkeypatch):
    """As with a class that was defined in an interactive session."""
    session = ModuleType("session")
    session.Own = type("Own", (nn.Linear,), {"__module__": "session"})
    monkeypatch.setitem(sys.modules, "session", session)
    joint = po.Joint(session.Own(3, 1).double(), Gaussian(0.3), Normal(), ROWS)
    outcomes = Processes(1).run([Task("own class", FIT, joint, numbers(FLOAT64)), *tasks(1)])
    assert "it cannot be sent to a process: ModuleNotFoundError" in outcomes[0].error
    assert outcomes[1].posterior is not None


def test_names_become_folders(tmp_path):
    (task,) = tasks(1)
    names = ["a/b", "a:b", "..", "x" * 300]
    given = [Task(name, FIT, task.joint, task.data, task.start) for name in names]
    Sequential().run(given, tmp_path)
    assert len(list(tmp_path.iterdir())) == len(names)
    assert all(path.parent == tmp_path for path in tmp_path.iterdir())


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: Processes(0), ValueError, "Processes.workers must be a positive whole number"),
        (lambda: Processes(1, -1), ValueError, "Processes.retries must be"),
        (lambda: Processes(1, threads=0), ValueError, "Processes.threads must be a positive whole number"),
        (lambda: Sequential().run([*tasks(1), *tasks(1)]), ValueError, "different names"),
        (lambda: Sequential().run([FIT]), TypeError, "must be a list of Task"),
        (lambda: Task("", FIT, None, None), ValueError, "Task.name"),
    ],
)
def test_bad_arguments_are_refused(make, error, words):
    with pytest.raises(error, match=words):
        make()
