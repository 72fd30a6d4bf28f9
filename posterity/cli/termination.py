"""A polite kill is a Ctrl-C: what it stops is stored."""

import multiprocessing
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def as_interrupt() -> Iterator[None]:
    """A context in which SIGTERM, as `kill`, `timeout` and schedulers send it, does what Ctrl-C does.

    Leaves the signal alone outside the main thread and where somebody else handles it.
    """
    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Interrupt this process and those that work for it, all of which a Ctrl-C in a terminal reaches."""
    for child in multiprocessing.active_children():
        child.kill()
    signal.raise_signal(signal.SIGINT)
