"""Running the stages of a method: progress and time."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from posterity.cli.frame.output import log
from posterity.cli.frame.tasks import EXACT, Task, label, make_method, stage_joint
from posterity.errors import Diverged
from posterity.inference import Checkpoint, Trace, infer
from posterity.posteriors import Posterior

SMALL = 10_000_000  # multiplications in one forward pass of a batch


@dataclass(frozen=True, eq=False)
class Stage:
    """What a stage gave, and the seconds it took in this process."""

    posterior: Posterior
    trace: Trace
    seconds: float


def run_stage(
    name: str, task: Task, start: Posterior | None, *, checkpoint: Checkpoint | None = None, quiet: bool = False
) -> Stage:
    """Run the stage `name` of the task, from the posterior of the stage before it."""
    begin = time.perf_counter()
    try:
        posterior, trace = infer(
            make_method(name, task.settings, task.joint),
            stage_joint(name, task),
            task.data.train.pair,
            start=start,
            seed=task.settings.seed,
            checkpoint=checkpoint,
            progress=not quiet and sys.stderr.isatty(),
        )
    except Diverged as error:
        smaller = f"--step-size than {task.settings.step_size:g}"
        error.add_note(f"try a smaller {'--prior-scale' if name in EXACT else smaller}.")
        raise
    seconds = time.perf_counter() - begin
    steps = (
        f", {int(trace.steps('loss')[-1])} steps, loss {float(trace['loss'][-1].mean()):.4f}" if "loss" in trace else ""
    )
    log(f"{label(name)}{steps}, {seconds:.1f} s", quiet=quiet)
    return Stage(posterior, trace, seconds)


def warm_up() -> None:
    """Let torch load now what its first Jacobian needs, about a second, which no method should be charged for."""
    torch.func.vmap(torch.func.jacrev(torch.square))(torch.ones(1))


@contextmanager
def fitting_threads(task: Task) -> Iterator[None]:
    """One thread for a small network, where threads wait for each other longer than they work.

    Somebody who sets OMP_NUM_THREADS is left alone.
    """
    threads = torch.get_num_threads()
    rows = task.settings.batch_size or len(task.data.train)
    if rows * task.joint.num_weights < SMALL and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
