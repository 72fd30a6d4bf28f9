"""Work that kills the process it runs in, for tests of executors; a file, so that processes can import it."""

import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from posterity.errors import Diverged
from posterity.inference.executor import named


class Deadly(nn.Linear):
    """Kills its process, unless that is the first one, the first `times` it is called there."""

    def __init__(self, folder: Path, times: int) -> None:
        super().__init__(3, 1)
        self.folder, self.times = folder, times

    def forward(self, x: Tensor) -> Tensor:
        die(self.folder, self.times)
        return super().forward(x)


def works_for_another() -> bool:
    """Whether another process started this one to work for it, as a pool of processes or Ray does."""
    return multiprocessing.parent_process() is not None or Path(sys.argv[0]).name == "default_worker.py"


def die(folder: Path, times: int) -> int:
    """Kill this process, unless it is the first one, the first `times`; gives the number of its threads."""
    if works_for_another():
        count = len(list(folder.iterdir()))
        if count < times:
            (folder / str(count)).touch()
            os.kill(os.getpid(), signal.SIGKILL)
    return torch.get_num_threads()


def wait(folder: Path) -> None:
    """Leave the number of this process in the folder `workers`, and wait for ten minutes."""
    (folder / "workers").mkdir()
    (folder / "workers" / str(os.getpid())).touch()
    time.sleep(600)


def diverge() -> None:
    """Fail in a way that the library expects."""
    with named("seed 3"):
        raise Diverged("The loss is NaN at step 3.", step=3, tensor="loss")
