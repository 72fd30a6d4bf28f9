"""Fits and questions of several processes, started as torchrun starts them; each writes what it got into a folder."""

import os
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import nn

import posterity as po
from benchmarks.distributed import port
from benchmarks.distributed_cases import CASES, adam, fit, long_run, problem, rows
from posterity import scale
from posterity.errors import BadFolder
from posterity.inference import Callback

QUICK = (
    "map adam",
    "map micro-batches",
    "map members",
    "mean-field",
    "natural gradient",
    "ivon",
    "hmc",
    "laplace rows",
    "laplace hessian",
    "laplace diagonal",
    "laplace hutchinson",
    "laplace low-rank",
    "laplace kronecker",
    "laplace corrected",
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
    except Exception as error:
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


def main(folder: Path, words: list[str]) -> None:
    torch.set_num_threads(1)
    with scale.join(timeout=120.0) as group:
        if words == ["run"]:
            long_run(folder)
            return
        results = {name: CASES[name]() for name in QUICK}
        results["questions"] = questions(group, folder)
        torch.save(results, folder / f"{group.rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
