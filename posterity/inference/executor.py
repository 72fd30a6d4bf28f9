"""Executors of many fits: one after the other, together as members, in processes, or on a Ray cluster."""

import logging
import math
import multiprocessing
import os
import pickle
import re
import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from posterity.datasets.dataset import LabelledData
from posterity.errors import PosterityError, positive, positive_whole, shown, whole
from posterity.inference.callbacks import bar
from posterity.inference.infer import starting_point
from posterity.inference.run import Trace
from posterity.inference.task import Outcome, Task, stored
from posterity.model.batch import batch_tensors
from posterity.model.data import OwnOrders, TensorData
from posterity.model.problem import data_of
from posterity.numerics.random import Key
from posterity.processes import LostProcess, active
from posterity.scale.parcels import Lost, Setting, done, error_line, opened, unsent

T = TypeVar("T")
Item = TypeVar("Item")
logger = logging.getLogger("posterity")


class Executor(ABC):
    """Runs tasks, each of them one fit, and returns an outcome for each."""

    def run(
        self, tasks: Sequence[Task], folder: str | os.PathLike[str] | None = None, progress: bool | None = None
    ) -> list[Outcome]:
        """Return the outcomes in the order of the tasks, whose names differ.

        A task that fails has an outcome with its error; the others continue. In `folder` each finished task has its
        own run folder, written atomically as soon as it finishes: the same call runs only missing and failed tasks.
        `progress` is whether to show one bar for all tasks on standard error; None: if that is a terminal.
        """
        by_name: dict[str, Task] = {}
        for task in tasks:
            if not isinstance(task, Task):
                raise TypeError(f"run: tasks must be a list of Task. Got {shown(task)} in it.")
            if task.name in by_name:
                raise ValueError(f"run: tasks must have different names. Got {task.name!r} twice.")
            by_name[task.name] = task
        paths = {} if folder is None else {name: Path(folder) / _file_name(name) for name in by_name}
        earlier = {name: stored(by_name[name], path) for name, path in paths.items()}
        outcomes = {name: outcome for name, outcome in earlier.items() if outcome is not None}
        with bar("fits", len(by_name), len(outcomes), progress) as whole:
            for outcome in self._outcomes([task for name, task in by_name.items() if name not in outcomes]):
                outcomes[outcome.name] = outcome
                if outcome.error:
                    logger.warning("%s: %s", outcome.name, outcome.error)
                elif outcome.name in paths:
                    outcome.save(by_name[outcome.name], paths[outcome.name])
                whole.advance()
        return [outcomes[name] for name in by_name]

    @abstractmethod
    def each(self, work: Mapping[str, Callable[[], T]]) -> Iterator[tuple[str, T | Lost]]:
        """Do named work; yields each result, or a Lost, as soon as it is there, and raises the errors of the work."""

    def results(self, work: Mapping[str, Callable[[], T]], progress: bool | None = None) -> Iterator[T]:
        """Do named work; yields each result as soon as it is there. The first error, or work that is lost, ends it.

        `progress` is as in `run`.
        """
        with bar("fits", len(work), wanted=progress) as whole:
            for name, result in self.each(work):
                if isinstance(result, Lost):
                    raise PosterityError(f"{name}: {result}")
                yield result
                whole.advance()

    def _outcomes(self, tasks: Sequence[Task]) -> Iterator[Outcome]:
        """Yield the outcome of each task as soon as it finishes."""
        for name, result in self.each({task.name: partial(_run, task) for task in tasks}):
            yield Outcome(name, error=str(result)) if isinstance(result, Lost) else result


@dataclass(frozen=True)
class Sequential(Executor):
    """Runs one task after the other, in this process.

    >>> import posterity as po
    >>> x = torch.linspace(-1, 1, 20).unsqueeze(1)
    >>> joint = po.Joint(torch.nn.Linear(1, 1), po.likelihoods.Gaussian(scale=0.1), po.priors.Normal(), num_data=20)
    >>> tasks = [Task(f"seed {seed}", po.methods.MAP(steps=50), joint, (x, 2 * x), seed=seed) for seed in range(3)]
    >>> [outcome.name for outcome in Sequential().run(tasks) if outcome.posterior is not None]
    ['seed 0', 'seed 1', 'seed 2']
    """

    def each(self, work: Mapping[str, Callable[[], T]]) -> Iterator[tuple[str, T | Lost]]:
        return ((name, item()) for name, item in work.items())


@dataclass(frozen=True)
class Batched(Executor):
    """Runs tasks that share method and problem together, as members; all others one after the other.

    The rows are the same, or tensors of equal shapes, such as splits of one data set. Members start and shuffle their
    rows as their tasks would alone; the noise of the steps comes from the first task's seed. For methods that draw
    nothing but the order of rows, the outcomes equal `Sequential`'s up to rounding. A batch that fails (a member
    diverges, or memory runs out) is run in halves. Other work is done one piece after the other.
    """

    def each(self, work: Mapping[str, Callable[[], T]]) -> Iterator[tuple[str, T | Lost]]:
        return Sequential().each(work)

    def _outcomes(self, tasks: Sequence[Task]) -> Iterator[Outcome]:
        groups: dict[object, list[Task]] = {}
        for task in tasks:
            shared = (repr(task.method), id(task.joint), _shapes(task.data), id(task.validation))
            plain = task.method.traits.takes_members and (task.start is None or isinstance(task.start, Tensor))
            groups.setdefault(shared if plain else id(task), []).append(task)
        for group in groups.values():
            for tasks, result in in_halves(group, _together, Exception, logger.info):
                if isinstance(result, Exception):
                    yield Outcome(tasks[0].name, error=error_line(result))
                else:
                    yield from result


@dataclass(frozen=True)
class Processes(Executor):
    """Runs tasks in `workers` processes, with the same bits as `Sequential`.

    Workers are spawned with `threads` threads, or for None as many as this process has. When one is killed, unfinished
    tasks are started again, `retries` times; then each remaining task gets its own process, which identifies the task
    that kills it. Tasks are pickled: modules and likelihoods must come from files, and a script must start its work
    under `if __name__ == "__main__":`.
    """

    workers: int
    retries: int = 1
    threads: int | None = None

    def __post_init__(self) -> None:
        positive_whole("Processes.workers", self.workers)
        whole("Processes.retries", self.retries)
        positive_whole("Processes.threads", 1 if self.threads is None else self.threads)

    def each(self, work: Mapping[str, Callable[[], T]]) -> Iterator[tuple[str, T | Lost]]:
        if active() is not None:
            yield from _shared(work)
            return
        waiting: dict[str, bytes] = {}
        for name, item in work.items():
            try:
                # Bytes, because tensors would be sent as handles of shared memory, which are scarce.
                waiting[name] = pickle.dumps(item)
            except Exception as error:
                yield name, unsent(error)
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
                yield name, Lost(reason)

    def _done(self, waiting: dict[str, bytes], workers: int) -> Iterator[tuple[str, Any]]:
        """Yield the results of one pool, and remove each from `waiting`. Ends early when a worker is killed."""
        # A fork of a process in which torch has run threads may hang, so workers are spawned.
        context = multiprocessing.get_context("spawn")
        setting = Setting.here(self.threads)
        pool = ProcessPoolExecutor(min(workers, len(waiting)), context, _begin, (setting,))
        try:
            futures: dict[Future[bytes], str] = {pool.submit(done, item): name for name, item in waiting.items()}
            for future in as_completed(futures):
                result = opened(future.result())
                del waiting[futures[future]]
                yield futures[future], result
        except BrokenProcessPool:
            return
        finally:
            pool.shutdown(cancel_futures=True)


@dataclass(frozen=True)
class Ray(Executor):
    """Runs tasks on a Ray cluster, with the same bits as `Processes`. Needs the extra `ray`.

    - `address`: of a cluster, such as "ray://host:10001" or "auto"; None is the one in RAY_ADDRESS, or else a new
      cluster on this machine, which ends with this process. A process that is connected already stays with its cluster.
    - `workers`: the most tasks at a time; None for as many as the cluster has room for.
    - `cpus`, `gpus`: what each task reserves of its node; None for a CPU for each thread.
    - `threads`: of each task; None for as many as this process has.
    - `retries`: how often a task is begun again whose worker or node has died.

    Tensors of 64 KiB and more that tasks share are shipped once. Classes of a script are shipped with the tasks; others
    come from files that the nodes have, as do posterity and torch, of the versions here. This process alone writes into
    the folder of `run`.

    >>> Ray(threads=1, gpus=0.5).retries
    3
    """

    address: str | None = None
    workers: int | None = None
    cpus: float | None = None
    gpus: float = 0.0
    threads: int | None = None
    retries: int = 3

    def __post_init__(self) -> None:
        for name in ("workers", "threads"):
            positive_whole(f"Ray.{name}", 1 if getattr(self, name) is None else getattr(self, name))
        positive("Ray.cpus", 1 if self.cpus is None else self.cpus)
        if self.gpus:
            positive("Ray.gpus", self.gpus)
        whole("Ray.retries", self.retries)

    def each(self, work: Mapping[str, Callable[[], T]]) -> Iterator[tuple[str, T | Lost]]:
        from posterity.scale import ray

        if active() is not None:
            yield from _shared(work)
            return
        setting = Setting.here(self.threads)
        cpus = setting.threads if self.cpus is None else self.cpus
        demand = ray.Demand(cpus, self.gpus, self.retries, self.workers, setting)
        ray.connect(
            self.address, math.ceil(max(cpus * (self.workers or 1), 0 if self.workers else os.cpu_count() or 1))
        )
        ray.check_room(demand)
        yield from ray.each(work, demand)


@contextmanager
def named(fit: object) -> Iterator[None]:
    """Prefix an expected error with the fit; raises PosterityError, since not every subclass can be pickled."""
    try:
        yield
    except PosterityError as error:
        failure = PosterityError(f"{fit}: {error}")
        failure.exit_code = error.exit_code
        raise failure from error


def _begin(setting: Setting) -> None:
    """Set up a worker like its parent, to end with it, and without a traceback of its own on Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    setting.take()


def _end_with_parent() -> None:
    """End this process when the one that started it is gone, perhaps killed: nobody would get the result."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def largest_group(
    items: Sequence[Item], most: int, room: Callable[[Sequence[Item]], bool], tell: Callable[[str], None]
) -> int:
    """Return how many items run together: as many as fit into memory, halving from `most`."""
    size = most
    while size > 1 and not room(items[:size]):
        size = (size + 1) // 2
    if size < most:
        tell(f"{len(items)} fits run in groups of {size}: memory has no room for more at once")
    return size


def in_halves(
    items: Sequence[Item],
    fit: Callable[[Sequence[Item]], T],
    failures: type[Exception] | tuple[type[Exception], ...],
    tell: Callable[[str], None],
) -> Iterator[tuple[Sequence[Item], T | Exception]]:
    """Fit the items together, or in halves where that fails; yields each group with its result.

    The result of a single item that fails is its error.
    """
    try:
        result = fit(items)
    except LostProcess:
        raise
    except failures as error:
        if len(items) == 1:
            yield items, error
            return
        why = first_line(error)
    else:
        yield items, result
        return
    tell(f"{len(items)} fits go in halves, because together they failed: {why}")
    if torch.cuda.is_available():  # the error is gone, and the memory that it held
        torch.cuda.empty_cache()
    half = (len(items) + 1) // 2
    yield from in_halves(items[:half], fit, failures, tell)
    yield from in_halves(items[half:], fit, failures, tell)


def _shared(work: Mapping[str, Callable[[], T]]) -> Iterator[tuple[str, T | Lost]]:
    """Do work in turn, where several processes share each fit."""
    logger.info("the processes that share this run share each fit in turn: no further workers are started")
    return Sequential().each(work)


def _run(task: Task) -> Outcome:
    """Run one task; returns its outcome, whatever error it raises."""
    try:
        posterior, trace = task.run()
    except LostProcess:
        raise
    except Exception as error:
        return Outcome(task.name, error=error_line(error))
    return Outcome(task.name, posterior, trace)


def _together(tasks: Sequence[Task]) -> list[Outcome]:
    """Run tasks that differ in seed and start as members of one run; returns their outcomes."""
    first = tasks[0]
    if len(tasks) == 1:
        return [Outcome(first.name, *first.run())]
    data = data_of(first.joint, first.data)
    if not isinstance(data, TensorData) or first.joint.num_members is not None:
        raise TypeError("rows are not in memory, or the problem has members of its own")
    starts = [starting_point(t.method, t.joint, t.start, data, Key(t.seed).fold("start"))[1] for t in tasks]
    orders = OwnOrders(_stacked(data, tasks), partial(_orders, tuple(task.seed for task in tasks)))
    posterior, trace = replace(first, data=orders, start=torch.stack(starts)).run()
    return [
        Outcome(task.name, posterior.member(index), _member_trace(trace, index, len(tasks)))
        for index, task in enumerate(tasks)
    ]


def _parts(data: object) -> tuple[object, ...]:
    return tuple(data) if isinstance(data, (tuple, list)) else (data,)


def _shapes(data: object) -> tuple[object, ...]:
    """Return what rows must have in common to run together: shapes and dtypes of tensors, or the same objects."""
    rows = data.pair if isinstance(data, LabelledData) else data
    parts = _parts(rows)
    if all(isinstance(part, Tensor) for part in parts):
        return tuple((part.shape, part.dtype, part.device) for part in parts if isinstance(part, Tensor))
    return tuple(map(id, parts))


def _stacked(data: TensorData, tasks: Sequence[Task]) -> TensorData:
    """Return the rows of all tasks with a member axis; without one where all tasks have the same rows."""
    if len({tuple(map(id, _parts(task.data))) for task in tasks}) == 1:
        return data
    each = [batch_tensors(task_rows.first()) for task_rows in (data_of(task.joint, task.data) for task in tasks)]
    stacked = (torch.stack(parts) for parts in zip(*each, strict=True))
    return replace(data, rows=data.rows.map(lambda _: next(stacked))._replace(per_member=True))


def _orders(seeds: tuple[int, ...], key: Key) -> list[Key]:
    """Return the keys by which runs with these seeds shuffle; equivalent ones for a method that folds the key."""
    own = [Key(seed).fold("batches") for seed in seeds]
    return own if key == own[0] else [key.fold(index) for index in range(len(seeds))]


def _member_trace(trace: Trace, index: int, count: int) -> Trace:
    """Return the trace of one of `count` members."""
    tensors = trace.tensors()
    for name, tensor in tensors.items():
        if name.startswith("value.") and tensor.dim() > 1 and tensor.shape[1] == count:
            tensors[name] = tensor[:, index]
    alone = Trace.from_tensors(tensors)
    alone.seconds = trace.seconds
    return alone


def first_line(error: Exception) -> str:
    """Return the first line of an error, or the name of its class where it has no message."""
    return (str(error) or type(error).__name__).splitlines()[0]


def _file_name(name: str) -> str:
    """Return a folder name for a task; different tasks have different ones."""
    plain = re.sub(r"[^A-Za-z0-9._ =,+-]", "_", name).strip(". ")[:80]
    return plain if plain == name else f"{plain}-{Key(0).fold(name).seed:016x}"
