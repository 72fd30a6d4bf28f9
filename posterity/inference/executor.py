"""Many fits behind one interface: in turn, side by side as members, or in processes."""

import logging
import multiprocessing
import os
import pickle
import re
import signal
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

from posterity.errors import BadFolder, Diverged, PosterityError, positive_whole, shown, whole
from posterity.inference.infer import starting_point
from posterity.inference.run import Trace
from posterity.inference.task import Outcome, Task, stored
from posterity.model.data import OwnOrders, TensorData, as_data
from posterity.numerics.random import Key

T = TypeVar("T")
Item = TypeVar("Item")
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
        by_name = {task.name: task for task in tasks}
        paths = {} if folder is None else {name: Path(folder) / _file_name(name) for name in by_name}
        there = {name: stored(by_name[name], path) for name, path in paths.items()}
        outcomes = {name: outcome for name, outcome in there.items() if outcome is not None}
        for outcome in self._outcomes([task for task in tasks if task.name not in outcomes]):
            outcomes[outcome.name] = outcome
            if outcome.error:
                logger.warning("%s: %s", outcome.name, outcome.error)
            elif outcome.name in paths:
                outcome.save(by_name[outcome.name], paths[outcome.name])
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
    order of their rows. A batch that fails (one of it diverges, or memory has no room) is run in halves.
    """

    def _outcomes(self, tasks: Sequence[Task]) -> Iterator[Outcome]:
        groups: dict[object, list[Task]] = {}
        for task in tasks:
            data = task.data if isinstance(task.data, (tuple, list)) else (task.data,)
            alike = (repr(task.method), id(task.joint), tuple(map(id, data)), id(task.validation))
            plain = task.method.traits.takes_members and (task.start is None or isinstance(task.start, Tensor))
            groups.setdefault(alike if plain else id(task), []).append(task)
        for group in groups.values():
            for tasks, result in in_halves(group, _together, Exception, logger.info):
                if isinstance(result, Exception):
                    yield Outcome(tasks[0].name, error=_line(result))
                else:
                    yield from result


@dataclass(frozen=True)
class Processes(Executor):
    """Tasks in `workers` processes, with the bits of `Sequential`.

    A worker starts afresh, with `threads` threads, or for None as many as this process has. When one is killed, what
    was not done is begun again, `retries` times; after that each remaining task gets a process of its own, so that the
    one that kills it is known. Tasks travel by pickle: modules and likelihoods must come from files, and a script must
    start its work under `if __name__ == "__main__":`.
    """

    workers: int
    retries: int = 1
    threads: int | None = None

    def __post_init__(self) -> None:
        positive_whole("Processes.workers", self.workers)
        whole("Processes.retries", self.retries)
        positive_whole("Processes.threads", 1 if self.threads is None else self.threads)

    def _outcomes(self, tasks: Sequence[Task]) -> Iterator[Outcome]:
        for name, result in self.each({task.name: partial(_run, task) for task in tasks}):
            yield Outcome(name, error=str(result)) if isinstance(result, Lost) else result

    def each(self, work: Mapping[str, Callable[[], T]]) -> Iterator[tuple[str, "T | Lost"]]:
        """Do named work: gives what each returns as soon as it is there; an error in it is raised."""
        waiting: dict[str, bytes] = {}
        for name, item in work.items():
            try:
                # Bytes, because tensors would go as handles of shared memory, of which a system has few.
                waiting[name] = pickle.dumps(item)
            except Exception as error:
                yield name, _unsent(error)
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
        """Results of one pool, each taken from `waiting`. It ends early when a worker is killed."""
        # A fork of a process in which torch has run threads may hang, so the workers start afresh.
        context = multiprocessing.get_context("spawn")
        setting = (self.threads or torch.get_num_threads(), torch.get_default_dtype())
        pool = ProcessPoolExecutor(min(workers, len(waiting)), context, _begin, setting)
        try:
            futures: dict[Future[bytes], str] = {pool.submit(_work, item): name for name, item in waiting.items()}
            for future in as_completed(futures):
                result = pickle.loads(future.result())
                del waiting[futures[future]]
                yield futures[future], result
        except BrokenProcessPool:
            return
        finally:
            pool.shutdown(cancel_futures=True)


def in_processes(work: Mapping[str, Callable[[], T]], jobs: int) -> Iterator[T]:
    """Do named work in `jobs` processes of one thread each; a single process or piece of work stays in this one.

    Gives what each returns as soon as it is there; the first error ends it.
    """
    if jobs == 1 or len(work) <= 1:
        for item in work.values():
            yield item()
        return
    for name, result in Processes(jobs, threads=1).each(work):
        if isinstance(result, Lost):
            raise PosterityError(f"{name}: {result}")
        yield result


@contextmanager
def named(fit: object) -> Iterator[None]:
    """Say in which fit an expected error came up; made anew, for not every class of them travels between processes."""
    try:
        yield
    except PosterityError as error:
        failure = PosterityError(f"{fit}: {error}")
        failure.exit_code = error.exit_code
        raise failure from error


class Lost(PosterityError):
    """Work that could not be sent to a process or back, or whose process was killed."""


def _begin(threads: int, dtype: torch.dtype) -> None:
    """A worker like its parent, that shows no traceback of its own when the user interrupts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    torch.set_num_threads(threads)
    torch.set_default_dtype(dtype)


def _work(item: bytes) -> bytes:
    """What the work returns; a Lost where it cannot be read (a class of an interactive session) or sent back."""
    try:
        work = pickle.loads(item)
    except Exception as error:
        return pickle.dumps(_unsent(error))
    result = work()
    try:
        return pickle.dumps(result)
    except Exception as error:
        return pickle.dumps(_unsent(error))


def _unsent(error: Exception) -> Lost:
    return Lost(f"it cannot be sent to a process: {_line(error)}. Define its parts in a file, or use Sequential().")


def largest_group(
    items: Sequence[Item], most: int, room: Callable[[Sequence[Item]], bool], tell: Callable[[str], None]
) -> int:
    """How many items run together: as many as memory has room for, halving from `most`."""
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
    """Fit the items together, or where that fails in halves; gives each group with its result.

    The result of a single item that fails is its error.
    """
    try:
        result = fit(items)
    except failures as error:
        if len(items) == 1:
            yield items, error
            return
        why = first_line(error)
    else:
        yield items, result
        return
    tell(f"{len(items)} fits go in halves, because together they failed: {why}")
    if torch.cuda.is_available():  # the error is gone, and with it what it held of memory
        torch.cuda.empty_cache()
    half = (len(items) + 1) // 2
    yield from in_halves(items[:half], fit, failures, tell)
    yield from in_halves(items[half:], fit, failures, tell)


def _run(task: Task) -> Outcome:
    """The outcome of one task, whatever happens in it."""
    try:
        posterior, trace = task.run()
    except Exception as error:
        return Outcome(task.name, error=_line(error))
    return Outcome(task.name, posterior, trace)


def _together(tasks: Sequence[Task]) -> list[Outcome]:
    """Outcomes of tasks that step together, as members of one run."""
    if len(tasks) == 1:
        return [Outcome(tasks[0].name, *tasks[0].run())]
    posterior, trace = _joined(tasks).run()
    return [
        Outcome(task.name, posterior.member(index), _column(trace, index, len(tasks)))
        for index, task in enumerate(tasks)
    ]


def _joined(tasks: Sequence[Task]) -> Task:
    """One task with a member for each of several that differ in seed and start."""
    first = tasks[0]
    data = as_data(first.data)
    if not isinstance(data, TensorData) or first.joint.num_members is not None:
        raise TypeError("rows are not in memory, or the problem has members of its own")
    starts = [starting_point(t.method, t.joint, t.start, data, Key(t.seed).fold("start"))[1] for t in tasks]
    orders = OwnOrders(data, partial(_orders, tuple(task.seed for task in tasks)))
    return replace(first, data=orders, start=torch.stack(starts))


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


def first_line(error: Exception) -> str:
    """The first line of an error, or its kind where it says nothing."""
    return (str(error) or type(error).__name__).splitlines()[0]


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
