"""Many fits behind one interface: one after the other, side by side as members, or in processes."""

import logging
import multiprocessing
import os
import pickle
import re
import signal
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from posterity.errors import BadFolder, Diverged, positive_whole, shown, whole
from posterity.inference.infer import infer, starting_point
from posterity.inference.method import Method
from posterity.inference.run import Trace
from posterity.model import Joint, Problem
from posterity.model.data import OwnOrders, TensorData, as_data
from posterity.numerics.random import Key
from posterity.posteriors.load import load
from posterity.posteriors.posterior import Posterior
from posterity.storage import Part, RunFolder


@dataclass(frozen=True, eq=False)
class Task:
    """A fit by name: method, problem, data, and what else `infer` takes."""

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
            "model": self.joint.encode(tensors),
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
    model = task.joint if task.joint.network is None else task.joint.network.module
    return Outcome(task.name, load(path, model), trace)  # type: ignore[arg-type]


def _other(task: Task, path: Path, name: str) -> BadFolder:
    return BadFolder(
        f"{str(path)!r} holds another fit than {task.name!r}: its {name} differs. "
        "Use another folder, or delete this one."
    )


logger = logging.getLogger("posterity")


class Executor(ABC):
    """Runs tasks, each one fit, and gives an outcome for each."""

    def run(self, tasks: Sequence[Task], folder: str | os.PathLike[str] | None = None) -> list[Outcome]:
        """The outcomes in the order of the tasks, whose names differ.

        A task that fails has an outcome with its error, and the others go on. In `folder` each finished task has a
        run folder of its own, written in one step: the same call does only what is missing, failed tasks among it.
        """
        tasks = list(tasks)
        _refuse_bad_tasks(tasks)
        places = {task.name: None if folder is None else Path(folder) / _file_name(task.name) for task in tasks}
        done = {task.name: stored(task, place) for task in tasks if (place := places[task.name]) is not None}
        outcomes = {name: outcome for name, outcome in done.items() if outcome is not None}
        for outcome in self._outcomes([task for task in tasks if task.name not in outcomes]):
            outcomes[outcome.name] = outcome
            place, task = places[outcome.name], next(task for task in tasks if task.name == outcome.name)
            if place is not None and outcome.posterior is not None:
                outcome.save(task, place)
            if outcome.error:
                logger.warning("%s: %s", outcome.name, outcome.error)
        return [outcomes[task.name] for task in tasks]

    @abstractmethod
    def _outcomes(self, tasks: Sequence[Task]) -> Iterator[Outcome]:
        """The outcome of each task, as soon as it is there."""


@dataclass(frozen=True)
class Sequential(Executor):
    """One task after the other, in this process.

    >>> import posterity as po
    >>> x = torch.linspace(-1, 1, 20).unsqueeze(1)
    >>> joint = po.Joint(torch.nn.Linear(1, 1), po.likelihoods.Gaussian(scale=0.1), po.priors.Normal(), num_data=20)
    >>> tasks = [Task(f"seed {seed}", po.methods.MAP(steps=50), joint, (x, 2 * x), seed=seed) for seed in range(3)]
    >>> [outcome.name for outcome in Sequential().run(tasks) if outcome.posterior is not None]
    ['seed 0', 'seed 1', 'seed 2']
    """

    def _outcomes(self, tasks: Sequence[Task]) -> Iterator[Outcome]:
        for task in tasks:
            yield _run(task)


@dataclass(frozen=True)
class Batched(Executor):
    """Tasks that share method, problem and data step together, as members; all others one after the other.

    Members begin where their tasks do, and shuffle rows in memory by their tasks' seeds; noise of the method's steps is
    that of the first task. So the outcomes are those of `Sequential` to rounding for methods that draw nothing but the
    order of their rows. Where one of a batch diverges, that batch is run one by one.
    """

    def _outcomes(self, tasks: Sequence[Task]) -> Iterator[Outcome]:
        groups: dict[object, list[Task]] = {}
        for task in tasks:
            data = task.data if isinstance(task.data, (tuple, list)) else (task.data,)
            alike = (repr(task.method), id(task.joint), tuple(map(id, data)), id(task.validation))
            plain = task.method.traits.takes_members and (task.start is None or isinstance(task.start, Tensor))
            groups.setdefault(alike if plain else id(task), []).append(task)
        for group in groups.values():
            if len(group) == 1:
                yield _run(group[0])
                continue
            try:
                outcomes = _together(group)
            except Exception as error:  # of one of them, perhaps: alone it is told whose
                logger.info("%d tasks go one by one, because together they failed: %s", len(group), _line(error))
                outcomes = [_run(task) for task in group]
            yield from outcomes


@dataclass(frozen=True)
class Processes(Executor):
    """Tasks in `workers` processes, with the bits of `Sequential`.

    A worker starts afresh, and has the number of threads that this process has. When one is killed, what was not done
    is begun again, `retries` times; after that each remaining task gets a process of its own, so that the one that
    kills it is known. Tasks travel by pickle: modules and likelihoods must come from files, and a script must start its
    work under `if __name__ == "__main__":`.
    """

    workers: int
    retries: int = 1

    def __post_init__(self) -> None:
        positive_whole("Processes.workers", self.workers)
        whole("Processes.retries", self.retries)

    def _outcomes(self, tasks: Sequence[Task]) -> Iterator[Outcome]:
        waiting: dict[str, bytes] = {}
        for task in tasks:
            try:
                # Bytes, because tensors would go as handles of shared memory, of which a system has few.
                waiting[task.name] = pickle.dumps(task)
            except Exception as error:
                yield _unsent(task.name, error)
        for attempt in range(self.retries + 1):
            if not waiting:
                return
            if attempt:
                logger.warning("a worker was killed: %d tasks are begun again", len(waiting))
            yield from self._done(waiting, self.workers)
        for name in list(waiting):
            alone = {name: waiting[name]}
            yield from self._done(alone, 1)
            if alone:
                reason = (
                    f"its process was killed, {self.retries + 2} times. Is there enough memory, and does the script "
                    'begin its work under `if __name__ == "__main__":`?'
                )
                yield Outcome(name, error=reason)

    def _done(self, waiting: dict[str, bytes], workers: int) -> Iterator[Outcome]:
        """Outcomes of one pool; what is there is taken from `waiting`. It ends early when a worker is killed."""
        # A fork of a process in which torch has run threads may hang, so the workers start afresh.
        context = multiprocessing.get_context("spawn")
        setting = (torch.get_num_threads(), torch.get_default_dtype())
        pool = ProcessPoolExecutor(min(workers, len(waiting)), context, _begin, setting)
        try:
            futures: dict[Future[bytes], str] = {pool.submit(_work, *item): item[0] for item in waiting.items()}
            for future in as_completed(futures):
                outcome: Outcome = pickle.loads(future.result())
                del waiting[futures[future]]
                yield outcome
        except BrokenProcessPool:
            return
        finally:
            pool.shutdown(cancel_futures=True)


def _begin(threads: int, dtype: torch.dtype) -> None:
    """A worker like its parent, that shows no traceback of its own when the user interrupts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    torch.set_num_threads(threads)
    torch.set_default_dtype(dtype)


def _work(name: str, task: bytes) -> bytes:
    """The outcome of a task, also where it cannot be read (a class of an interactive session) or sent back."""
    try:
        return pickle.dumps(_run(pickle.loads(task)))
    except Exception as error:
        return pickle.dumps(_unsent(name, error))


def _unsent(name: str, error: Exception) -> Outcome:
    advice = "Define its parts in a file, or use Sequential()."
    return Outcome(name, error=f"it cannot be sent to a process: {_line(error)}. {advice}")


def _run(task: Task) -> Outcome:
    """The outcome of one task, whatever happens in it."""
    try:
        posterior, trace = infer(
            task.method,
            task.joint,
            task.data,
            start=task.start,
            validation=task.validation,
            seed=task.seed,
            progress=False,
        )
    except Exception as error:
        return Outcome(task.name, error=_line(error))
    return Outcome(task.name, posterior, trace)


def _together(tasks: Sequence[Task]) -> list[Outcome]:
    """Outcomes of tasks that differ in seed and start, as members of one run."""
    first = tasks[0]
    data = as_data(first.data)
    if not isinstance(data, TensorData) or (isinstance(first.joint, Joint) and first.joint.num_members is not None):
        raise TypeError("rows are not in memory, or the problem has members of its own")
    starts = [starting_point(t.method, t.joint, t.start, data, Key(t.seed).fold("start"))[1] for t in tasks]
    posterior, trace = infer(
        first.method,
        first.joint,
        OwnOrders(data, partial(_orders, tuple(task.seed for task in tasks))),
        start=torch.stack(starts),
        validation=first.validation,
        seed=first.seed,
        progress=False,
    )
    return [
        Outcome(task.name, posterior.member(index), _column(trace, index, len(tasks)))
        for index, task in enumerate(tasks)
    ]


def _orders(seeds: tuple[int, ...], key: Key) -> list[Key]:
    """The keys by which runs with these seeds shuffle; of a method that folds the key, others as good."""
    own = [Key(seed).fold("batches") for seed in seeds]
    return own if key == own[0] else [key.fold(index) for index in range(len(seeds))]


def _column(trace: Trace, index: int, count: int) -> Trace:
    """The trace of one member."""
    tensors = {
        name: tensor[:, index]
        if name.startswith("value.") and tensor.dim() > 1 and tensor.shape[1] == count
        else tensor
        for name, tensor in trace.tensors().items()
    }
    alone = Trace.from_tensors(tensors)
    alone.seconds = trace.seconds
    return alone


def _line(error: Exception) -> str:
    """An error on one line."""
    kind = "" if isinstance(error, (Diverged, BadFolder)) else f"{type(error).__name__}: "
    return f"{kind}{' '.join(str(error).split())}"


def _file_name(name: str) -> str:
    """The name as a folder's: other names give other ones."""
    plain = re.sub(r"[^A-Za-z0-9._ =,+-]", "_", name).strip(". ")[:80]
    return plain if plain == name else f"{plain}-{Key(0).fold(name).seed:016x}"


def _refuse_bad_tasks(tasks: Sequence[object]) -> None:
    names = set()
    for task in tasks:
        if not isinstance(task, Task):
            raise TypeError(f"run: tasks must be a list of Task. Got {shown(task)} in it.")
        if task.name in names:
            raise ValueError(f"run: tasks must have different names. Got {task.name!r} twice.")
        names.add(task.name)
