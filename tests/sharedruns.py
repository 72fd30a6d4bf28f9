"""Fits and questions of several processes, started as torchrun starts them; each writes what it got into a folder."""

import errno
import os
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import posterity as po
from benchmarks.distributed import port
from benchmarks.distributed_cases import CASES, adam, fit, long_run, problem, rows
from posterity import scale
from posterity.errors import BadFolder
from posterity.inference import Callback, kept
from posterity.scale import group as groups
from posterity.storage import disk
from posterity_studies.shared_fits import Deadline

QUICK = (
    "map adam",
    "map micro-batches",
    "map members",
    "mean-field",
    "natural gradient",
    "ivon",
    "ivon in pieces",
    "hmc",
    "laplace rows",
    "laplace hessian",
    "laplace diagonal",
    "laplace hutchinson",
    "laplace low-rank",
    "laplace kronecker",
    "laplace corrected",
    "conjugate",
    "conjugate wide",
    "variational em",
    "mixture full",
    "scores",
    "bf16",
)


def start(folder: Path, size: int, *words: str) -> list[subprocess.Popen]:
    """Start `size` processes that do what the words say."""
    given = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port()), "OMP_NUM_THREADS": "1"}
    environment = {**os.environ, **given, "PYTHONPATH": os.pathsep.join(sys.path)}
    processes = []
    for rank in range(size):
        with open(folder / f"{rank}.log", "ab") as log:
            command = [sys.executable, "-W", "error", __file__, str(folder), *words]
            own = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            processes.append(subprocess.Popen(command, stdout=log, stderr=log, env=own))
    return processes


def finished(folder: Path, size: int, *words: str) -> list[dict]:
    """What each of `size` processes got."""
    for rank, process in enumerate(start(folder, size, *words)):
        assert process.wait(300) == 0, (folder / f"{rank}.log").read_text()[-3000:]
    return [torch.load(folder / f"{rank}.pt") for rank in range(size)]


def ended(processes: list[subprocess.Popen], seconds: float) -> bool:
    """Whether all of them end within that time."""
    deadline = time.monotonic() + seconds
    while any(process.poll() is None for process in processes):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


class StopIn(Callback):
    """Stops the run in one process."""

    def __init__(self, stops: bool) -> None:
        self.stops = stops

    def after_step(self, run):
        if self.stops and run.step == 7:
            run.stopped = "enough"


def message(work) -> str:
    """What the error of this work says."""
    try:
        work()
    except (Exception, KeyboardInterrupt) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def linear() -> nn.Module:
    return nn.Linear(5, 2)


def refused() -> bytes:
    raise BadFolder("nothing there")


def questions(group: scale.Group, folder: Path) -> dict:
    """Answers that do not come from fits alone."""
    inputs, labels, weights = rows()
    own = slice(0, 0) if group.rank == 1 else slice(0, 80) if group.rank == 0 else slice(80, None)  # none in process 1
    together = scale.gathered((inputs[own], labels[own], weights[own]))
    torch.manual_seed(group.rank)
    other = po.Joint(nn.Linear(5, 2).double(), po.likelihoods.Categorical(), po.priors.Normal(1.0), num_data=203)
    stopped = po.infer(adam(), problem(), rows(), callbacks=[StopIn(group.rank == 2)], progress=False)[1]
    checkpoint = po.Checkpoint(folder / "checkpoint", steps=10)
    draws: list[str] = []
    po.infer(
        po.methods.HMC(draws=2, warmup=0, step_size=0.02, steps=2),
        problem(),
        rows(),
        checkpoint=folder / "draws",
        callbacks=[lambda run: draws.append(str(run.kept._folder))],
        progress=False,
    )
    po.infer(adam(20), problem(), rows(), checkpoint=checkpoint, progress=True)
    again = po.infer(adam(40), problem(), rows(), checkpoint=checkpoint, progress=False)
    return {
        "gathered": fit(adam(20), data=together),
        "whole": fit(adam(20)),
        "rank": torch.tensor(group.rank),
        "first": message(lambda: group.from_first(refused)),
        "norm": message(lambda: fit(adam(), problem(normed))),
        "other rows": message(lambda: fit(adam(), data=(inputs + group.rank, labels))),
        "other weights": message(lambda: fit(adam(), other)),
        "other callbacks": message(
            lambda: po.infer(adam(), problem(), rows(), callbacks=[StopIn(False)] * group.rank, progress=False)
        ),
        "other checkpoint": message(
            lambda: po.infer(adam(), problem(), rows(), checkpoint=None if group.rank else folder / "other")
        ),
        "draws": draws[0],
        "stopped after": len(stopped["loss"]),
        "continued": again[0].point(),
        "uninterrupted": po.infer(adam(40), problem(), rows(), progress=False)[0].point(),
        "scales": po.infer(
            po.methods.MAP(),
            po.Joint(problem(linear).network, po.likelihoods.Categorical(), po.priors.Normal(), num_data=203),
            rows(),
            progress=False,
        )[0].point(),
    }


class Breaks(Callback):
    """Raises an error after some step."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error

    def after_step(self, run):
        if self.error is not None and run.step == 5:
            raise self.error


class Broken(Dataset):
    """Rows of which one cannot be read in one process."""

    def __init__(self, breaks: bool) -> None:
        self.inputs, self.labels, _ = rows()
        self.breaks = breaks

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        if self.breaks and index == 150:
            raise OSError("the file is damaged")
        return self.inputs[index], self.labels[index]


def failures(rank: int, folder: Path) -> dict:
    """What each process says where one of them fails, or all do."""
    answers = {}

    def ask(name: str, work) -> None:
        with scale.processes():
            answers[name] = message(work)
            answers[f"{name}, then"] = message(lambda: fit(adam(5)))

    def only(process: int, error: BaseException) -> BaseException | None:
        return error if rank == process else None

    def full_disk() -> str:
        full = mock.patch.object(disk, "write", side_effect=OSError(errno.ENOSPC, "No space left on device"))
        with full:
            return fit(adam(), checkpoint=po.Checkpoint(folder / "full", steps=10))

    def little_room() -> str:
        little = mock.patch.object(kept, "device_memory", return_value=8 if rank == 2 else None)
        with little, mock.patch("shutil.disk_usage", return_value=mock.Mock(free=0)):
            return fit(po.methods.HMC(draws=20, warmup=0, step_size=0.02, steps=2))

    files = DataLoader(Broken(rank == 1), batch_size=50)
    ask("callback", lambda: fit(adam(), callbacks=[Breaks(only(1, ValueError("mine")))]))
    ask("callback of the first", lambda: fit(adam(), callbacks=[Breaks(only(0, ValueError("mine")))]))
    ask("callback of all", lambda: fit(adam(), callbacks=[Breaks(ValueError("ours"))]))
    ask("interruption", lambda: fit(adam(), callbacks=[Breaks(only(2, KeyboardInterrupt()))]))
    ask("full disk", full_disk)
    ask("little room", little_room)
    ask("damaged file", lambda: fit(adam(), data=files))
    ask("other settings", lambda: fit(adam(), micro_batch=None if rank == 2 else 7))
    ask("other checkpoints", lambda: fit(adam(), checkpoint=po.Checkpoint(folder / "often", steps=2 + rank)))
    ask("time", lambda: fit(adam(), callbacks=[Deadline(0.0 if rank == 1 else 1000.0)]))
    ask("in one only", lambda: po.infer(adam(), problem(), rows(), seed="one" if rank == 1 else 3))
    inputs, labels, _ = rows()
    ask("ragged rows", lambda: scale.gathered((inputs[:3], labels[: 2 if rank == 1 else 3])))
    answers["left by the others"] = message(lambda: leave_unless_first(rank))
    return answers


def leave_unless_first(rank: int) -> None:
    """Call infer in process 0 alone."""
    with scale.processes():
        if rank == 0:
            fit(adam(5))


def main(folder: Path, words: list[str]) -> None:
    torch.set_num_threads(1)
    with scale.join(timeout=120.0) as group:
        if words == ["run"]:
            long_run(folder)
            return
        results = {name: CASES[name]() for name in QUICK if words == ["fits"]}
        if words == ["fits"]:
            results["questions"] = questions(group, folder)
        groups.AGREE = 0.5
        results["failures"] = failures(group.rank, folder)
        torch.save(results, folder / f"{group.rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
