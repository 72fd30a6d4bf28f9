"""Fits of a study in several processes, and errors that say in which fit they came up."""

import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from typing import TypeVar

import torch

from posterity.errors import PosterityError

T = TypeVar("T")


def run_all(work: Sequence[Callable[[], T]], jobs: int) -> Iterator[T]:
    """Do the tasks in `jobs` processes of one thread each; give what each returns as soon as it is done."""
    if jobs == 1 or len(work) <= 1:
        for task in work:
            yield task()
        return
    # A fork of a process in which torch has run threads may hang, so the workers start afresh.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(min(jobs, len(work)), context, _worker)
    try:
        for future in as_completed([pool.submit(task) for task in work]):
            yield future.result()
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def named(fit: object) -> Iterator[None]:
    """Say in which fit an expected error came up; made anew, for not every class of them travels between processes."""
    try:
        yield
    except PosterityError as error:
        failure = PosterityError(f"{fit}: {error}")
        failure.exit_code = error.exit_code
        raise failure from error


def _worker() -> None:
    """One thread, and no traceback of its own when the user interrupts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    torch.set_num_threads(1)
