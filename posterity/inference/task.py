"""Named fits, their outcomes, and how these are stored."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from posterity.errors import shown
from posterity.inference.callbacks import Callback
from posterity.inference.checkpoint import Checkpoint
from posterity.inference.identity import identity, refuse_other
from posterity.inference.infer import infer
from posterity.inference.method import Method
from posterity.inference.run import Trace
from posterity.model.data import as_data
from posterity.model.joint import Joint
from posterity.model.problem import Problem, data_of, labels_of
from posterity.posteriors.load import posterior_of
from posterity.posteriors.posterior import Posterior
from posterity.processes import active, done_by_first
from posterity.storage import Part, RunFolder


@dataclass(frozen=True, eq=False)
class Task:
    """A named fit: method, problem, data, and the other arguments of `infer`."""

    name: str
    method: Method
    joint: Problem
    data: object
    start: Posterior | Tensor | None = None
    validation: object = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"Task.name must be a word or more. Got {shown(self.name)}.")

    def identity(self) -> Part:
        """Return everything that the numbers of the fit depend on; what the method leaves out is settled."""
        rows = data_of(self.joint, self.data)
        return identity(
            start=self.start,
            method=self.method.settled(self.joint, rows),
            seed=self.seed,
            data=rows,
            validation="none" if self.validation is None else as_data(self.validation, labels=labels_of(self.joint)),
            model=self.joint,
            **({"initial": self.joint.initial()} if isinstance(self.joint, Joint) else {}),
        )

    def run(self, checkpoint: Checkpoint | None = None, callbacks: Sequence[Callback] = ()) -> tuple[Posterior, Trace]:
        """Run the fit; an interrupted fit resumes from its checkpoint."""
        return infer(
            self.method,
            self.joint,
            self.data,
            start=self.start,
            validation=self.validation,
            seed=self.seed,
            checkpoint=checkpoint,
            callbacks=callbacks,
            progress=False,
        )


@dataclass(frozen=True, eq=False)
class Outcome:
    """The outcome of a task: a posterior and the trace of its run, or the error on one line."""

    name: str
    posterior: Posterior | None = None
    trace: Trace | None = None
    error: str = ""

    def save(self, task: Task, path: Path) -> None:
        """Write the outcome into a run folder, atomically."""
        assert self.posterior is not None
        assert self.trace is not None
        trace = Part({"seconds": self.trace.seconds}, self.trace.tensors())
        parts = {**self.posterior.parts(), "task": task.identity(), "trace": trace}
        done_by_first(lambda: RunFolder(path).commit(parts))


def stored(task: Task, path: Path) -> Outcome | None:
    """Return the outcome of the task in this run folder, None if it has none; raises BadFolder for another task's."""
    folder = RunFolder(path, active())
    if not folder.exists():
        return None
    refuse_other(path, task.identity(), folder.read("task"), f"another fit than {task.name!r}")
    part = folder.read("trace")
    trace = Trace.from_tensors(part.tensors)
    trace.seconds = float(part.config["seconds"])  # type: ignore[arg-type]
    model: Any = task.joint if task.joint.network is None else task.joint.network.module
    return Outcome(task.name, posterior_of(folder.read("posterior"), model, repr(os.fspath(path))), trace)
