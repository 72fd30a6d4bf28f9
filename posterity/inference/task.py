"""One fit among many, and what came of it."""

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from posterity.errors import BadFolder, shown
from posterity.inference.method import Method, Target
from posterity.inference.trace import Trace
from posterity.model.data import as_data
from posterity.model.joint import Joint
from posterity.posteriors.load import load
from posterity.posteriors.posterior import Posterior
from posterity.storage import Part, RunFolder


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
        tensors: dict[str, Tensor] = {}
        start: object = None
        if isinstance(self.start, Tensor):
            tensors["start"] = self.start
        elif self.start is not None:
            part = self.start.parts()["posterior"]
            start = dict(part.config)
            tensors.update({f"start.{name}": tensor for name, tensor in part.tensors.items()})
        config = {
            "method": repr(self.method),
            "seed": self.seed,
            "data": as_data(self.data).fingerprint(),
            "validation": "none" if self.validation is None else as_data(self.validation).fingerprint(),
            "model": self.joint.encode(tensors) if isinstance(self.joint, Joint) else self.joint.encode(),
            "start": start,
        }
        if isinstance(self.joint, Joint):
            tensors["initial"] = self.joint.initial()
        return Part(config, tensors)  # type: ignore[arg-type]


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
    mine, kept = task.identity(), folder.read("task")
    for name, value in mine.config.items():
        if kept.config.get(name) != value:
            raise _other(task, path, name)
    for name in mine.tensors.keys() | kept.tensors.keys():
        one, two = mine.tensors.get(name), kept.tensors.get(name)
        if one is None or two is None or one.shape != two.shape or not bool((one.cpu() == two).all()):
            raise _other(task, path, name.partition(".")[0])
    part = folder.read("trace")
    trace = Trace.from_tensors(part.tensors)
    trace.seconds = float(part.config["seconds"])  # type: ignore[arg-type]
    model = task.joint.network.module if isinstance(task.joint, Joint) else task.joint
    return Outcome(task.name, load(path, model), trace)


def _other(task: Task, path: Path, name: str) -> BadFolder:
    return BadFolder(
        f"{str(path)!r} holds another fit than {task.name!r}: its {name} differs. "
        "Use another folder, or delete this one."
    )
