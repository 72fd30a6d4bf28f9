"""Fits that several processes share have the numbers of one process."""

import os
import signal
import time

import pytest
import sharedruns
import torch
import torch.distributed as dist

from benchmarks.distributed import difference
from benchmarks.distributed_cases import CASES, digest, long_run, tolerance
from posterity import scale

pytestmark = pytest.mark.cpu


@pytest.fixture(scope="module")
def of_three(tmp_path_factory):
    """What each of three processes got."""
    return sharedruns.finished(tmp_path_factory.mktemp("three"), 3, "fits")


@pytest.fixture
def by_itself(monkeypatch):
    """This process as the only one of a group, as torchrun would start it."""
    monkeypatch.setenv("RANK", "0")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with scale.processes() as group:
            yield group
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("name", sharedruns.QUICK)
def test_three_processes_have_the_numbers_of_one(of_three, name):
    alone, shared = CASES[name](), of_three[0][name]
    assert alone.keys() == shared.keys()
    assert difference(alone, shared) <= tolerance(name)


@pytest.mark.parametrize("name", ["map adam", "laplace kronecker"])
def test_one_process_of_a_group_has_the_bits_of_three(of_three, by_itself, name):
    assert digest(CASES[name]()) == digest(of_three[0][name])


@pytest.mark.parametrize("name", sharedruns.QUICK)
def test_all_processes_have_the_same_bits(of_three, name):
    assert len({digest(own[name]) for own in of_three}) == 1


def test_rows_that_are_spread_over_processes_are_the_whole_rows(of_three):
    for own in of_three:
        assert digest(own["questions"]["gathered"]) == digest(own["questions"]["whole"])


def test_errors_come_in_every_process(of_three):
    for own in of_three:
        answers = own["questions"]
        assert answers["first"] == "BadFolder: nothing there"
        assert "a batch that several processes share needs outputs of rows that do not depend" in answers["norm"]
        assert "Got another data in process 1 than in process 0: give each of them all rows" in answers["other rows"]
        for name in ("other callbacks", "other checkpoint"):
            assert (
                "Got another kind of callbacks or checkpoint in process 1 than in process 0: give them" in answers[name]
            )
        assert "Got another start in process 1 than in process 0: call torch.manual_seed" in answers["other weights"]


ONE = {  # what fails in one process: which, and what it says
    "callback": (1, "ValueError: mine"),
    "callback of the first": (0, "ValueError: mine"),
    "interruption": (2, "KeyboardInterrupt"),
    "little room": (2, "ValueError: 20 kept states take"),
    "damaged file": (1, "OSError: the file is damaged"),
    "in one only": (1, "TypeError: infer: seed must be a whole number. Got 'one'."),
    "ragged rows": (1, "BadData: inputs, targets and weights must have the same number of rows"),
}


@pytest.mark.parametrize("name", ONE)
def test_an_error_of_one_process_ends_all(of_three, name):
    which, text = ONE[name]
    lost = f"LostProcess: Process {which} of this run stopped, and with it the others: {text}"
    for rank, own in enumerate(of_three):
        assert own["failures"][name].startswith(text if rank == which else lost)
        assert own["failures"][f"{name}, then"].startswith(lost)


ALL = {
    "callback of all": "ValueError: ours",
    "time": "OutOfTime: after step 2 of 100 the time of this row was over",
    "full disk": "BadFolder: Cannot write run folder",
    "other settings": "PosterityError: The processes that share a run must agree. Got another kind of settings",
    "other checkpoints": "PosterityError: The processes that share a run must agree. Got another kind of callbacks or",
}


@pytest.mark.parametrize("name", ALL)
def test_processes_that_all_fail_go_on_together(of_three, name):
    for own in of_three:
        assert own["failures"][name].startswith(ALL[name])
        assert own["failures"][f"{name}, then"] == "no error"


def test_a_call_that_the_others_do_not_make_is_refused_in_all(of_three):
    for own in of_three:
        assert "must make the same calls. Process 1 makes another one" in own["failures"]["left by the others"]


def test_draws_go_to_the_folder_of_the_checkpoint_in_each_process(of_three):
    assert len({own["questions"]["draws"] for own in of_three}) == 1


def test_a_callback_in_one_process_stops_all(of_three):
    assert [own["questions"]["stopped after"] for own in of_three] == [7, 7, 7]


def test_a_checkpoint_of_several_processes_is_continued(of_three):
    for own in of_three:
        assert torch.equal(own["questions"]["continued"], own["questions"]["uninterrupted"])


def test_scales_that_are_left_out_are_the_same_in_all(of_three):
    assert all(torch.equal(own["questions"]["scales"], of_three[0]["questions"]["scales"]) for own in of_three)


def test_a_killed_process_ends_the_other_and_one_process_finishes_the_run(tmp_path, by_itself):
    reference, folder = tmp_path / "reference", tmp_path / "killed"
    reference.mkdir()
    folder.mkdir()
    long_run(reference)
    processes = sharedruns.start(folder, 2, "run")
    step = folder / "step"
    while not (step.exists() and int(step.read_text() or 0) >= 100):
        assert all(process.poll() is None for process in processes), (folder / "0.log").read_text()
        time.sleep(0.01)
    os.kill(processes[1].pid, signal.SIGKILL)
    assert sharedruns.ended(processes, 10.0)
    assert "Start all of them again" in (folder / "0.log").read_text()
    long_run(folder)
    assert int((folder / "resumed").read_text()) >= 80
    assert digest(torch.load(folder / "result")) == digest(torch.load(reference / "result"))
