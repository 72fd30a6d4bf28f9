"""A fit by name, what came of it, and how both are stored: the posterior in a run folder, or scores in a file."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from torch import Tensor

from posterity.errors import BadFolder, shown
from posterity.inference.identity import identity, refuse_other
from posterity.inference.method import Method, Target
from posterity.inference.run import Trace
from posterity.model.data import as_data
from posterity.model.joint import Joint
from posterity.posteriors.load import load
from posterity.posteriors.posterior import Posterior
from posterity.storage import Part, RunFolder
from posterity.storage.disk import write_file

Identity = dict[str, Any]
C = TypeVar("C")


@dataclass(frozen=True, eq=False)
class Task:
    """A fit by name: method, problem, data, and what else `infer` takes."""

    name: str
    method: Method
    joint: Target
    data: object
    start: Posterior | Tensor | None = None
    validation: object = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"Task.name must be a word or more. Got {shown(self.name)}.")

    def identity(self) -> Part:
        """All that the numbers of the fit depend on."""
        return identity(
            start=self.start,
            method=self.method,
            seed=self.seed,
            data=as_data(self.data),
            validation="none" if self.validation is None else as_data(self.validation),
            model=self.joint,
            **({"initial": self.joint.initial()} if isinstance(self.joint, Joint) else {}),
        )


@dataclass(frozen=True, eq=False)
class Outcome:
    """What came of a task: a posterior and the trace of its run, or the error, on one line."""

    name: str
    posterior: Posterior | None = None
    trace: Trace | None = None
    error: str = ""

    def save(self, task: Task, path: Path) -> None:
        """Write it into a run folder, in one step."""
        assert self.posterior is not None
        assert self.trace is not None
        trace = Part({"seconds": self.trace.seconds}, self.trace.tensors())
        RunFolder(path).commit({**self.posterior.parts(), "task": task.identity(), "trace": trace})


def stored(task: Task, path: Path) -> Outcome | None:
    """The outcome of the task in this run folder, None where there is none; BadFolder where it is of another task."""
    folder = RunFolder(path)
    if not folder.exists():
        return None
    refuse_other(path, task.identity(), folder.read("task"), f"another fit than {task.name!r}")
    part = folder.read("trace")
    trace = Trace.from_tensors(part.tensors)
    trace.seconds = float(part.config["seconds"])  # type: ignore[arg-type]
    model = task.joint.network.module if isinstance(task.joint, Joint) else task.joint
    return Outcome(task.name, load(path, model), trace)


@dataclass(frozen=True)
class Result(Generic[C]):
    """What a cell of a study gave: its scores, and the seconds that its fit took, or its share of those of a group."""

    cell: C
    scores: dict[str, float]
    seconds: float


def read_result(path: Path, wanted: Identity) -> tuple[dict[str, float], float]:
    """Scores and seconds in the file; BadFolder where it is damaged, or was made with anything else than `wanted`."""
    try:
        content = json.loads(path.read_bytes())
        kept, scores, seconds = content["identity"], content["scores"], content["seconds"]
        whole = isinstance(kept, dict) and all(math.isfinite(value) for value in (*scores.values(), seconds))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        whole = False
    if not whole:
        raise BadFolder(f"'{path}' holds no result of the study. Delete it, and it is computed again.")
    for key in dict.fromkeys((*wanted, *kept)):
        if kept.get(key) != wanted.get(key):
            raise BadFolder(
                f"'{path}' was made with other settings. Its {key}: {kept.get(key)}, now {wanted.get(key)}. "
                "Give another --out, or delete the folder 'runs' in this one."
            )
    return scores, seconds


def write_result(path: Path, identity: Identity, scores: dict[str, float], seconds: float) -> None:
    """Write what a fit gave, with all that it depends on, whole or not at all."""
    document = {"identity": identity, "scores": scores, "seconds": seconds}
    write_file(path, (json.dumps(document, indent=2, allow_nan=False) + "\n").encode())
