"""The command line as torchrun starts it: what each process does, prints and writes."""

import os
import subprocess
import sys

import pytest

from benchmarks.distributed import port
from posterity.cli.frame import shared
from posterity.storage import RunFolder

pytestmark = pytest.mark.cpu
TINY = ("--hidden", "6", "--steps", "40", "--prior-scale", "1", "--device", "cpu")


@pytest.fixture
def as_process(monkeypatch):
    """A function that makes this process the one of that number among so many."""

    def make(rank, size):
        given = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": size,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port(),
        }
        for name, value in {"TORCHELASTIC_RUN_ID": "test", **given}.items():
            monkeypatch.setenv(name, str(value))

    return make


def started(rank, size, where, *words):
    """The command in a process of its own."""
    given = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": where}
    environment = {**os.environ, **{name: str(value) for name, value in given.items()}, "TORCHELASTIC_RUN_ID": "test"}
    environment |= {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "posterity", *map(str, words)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_two_processes_fit_together_and_the_first_prints_and_writes(tmp_path, run, as_process):
    words, where = ("fit", "two-moons", *TINY, "--method", "laplace", "--out"), port()
    processes = [started(rank, 2, where, *words, tmp_path / "two") for rank in range(2)]
    (out, errors), nothing = (process.communicate(timeout=120) for process in processes)
    assert [process.returncode for process in processes] == [0, 0], errors
    assert "test NLL" in out
    assert nothing == ("", "")
    as_process(0, 1)
    assert run(*words, tmp_path / "one").code == 0
    assert RunFolder(tmp_path / "two").parts() == RunFolder(tmp_path / "one").parts()
    for part in ("posterior", "scores", "trace"):
        one, two = (RunFolder(tmp_path / name).read(part) for name in ("one", "two"))
        assert one.config == two.config
        assert {name: tensor.tolist() for name, tensor in one.tensors.items()} == {
            name: tensor.tolist() for name, tensor in two.tensors.items()
        }
    assert "finished already" in run(*words, tmp_path / "two").err


def test_a_verb_that_fits_nothing_is_the_work_of_the_first_process(run, as_process):
    as_process(1, 2)
    silent = run("data", "--help")
    assert (silent.code, silent.out, silent.err) == (0, "", "")
    as_process(0, 2)
    assert "Usage" in run("data", "--help").out


def test_an_error_is_said_once(run, as_process, monkeypatch):
    monkeypatch.setattr(shared, "LATER", 0.0)
    error = ValueError("no such file")
    error.said_by_first = True
    as_process(1, 2)
    assert shared.said_by_first(error)
    assert not shared.said_by_first(ValueError("in this process alone"))
    as_process(0, 2)
    assert not shared.said_by_first(error)
    as_process(0, 1)
    result = run("fit", "nowhere.csv", "--target", "y", "--out", "nowhere")
    assert result.code == 3
    assert result.err.startswith("error: nowhere.csv")
