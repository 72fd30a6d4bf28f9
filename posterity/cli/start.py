"""The start of the command line: signals are handled before anything else is imported."""

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

INTERRUPTED = 130
GRACE = 3.5  # seconds after SIGTERM in which a run may finish its step and be stored
AT_ONCE = 1.0  # seconds after a second signal


def main() -> int:
    """Run the command line of this process and give its exit code; a signal during the imports ends it at once."""
    for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL)):
        if signal.getsignal(number) is usual:
            signal.signal(number, leave)
    from posterity.cli.main import main as run

    code = run()
    if code == INTERRUPTED:  # what libraries do at the end of a process, such as stopping compilers, may take seconds
        sys.stdout.flush()
        sys.stderr.flush()
        _end_children()
        os._exit(code)
    return code


def leave(number: int | None = None, frame: FrameType | None = None) -> None:
    """End this process and its workers at once, with the line and the exit code of an interruption."""
    _end_children()
    show_cursor = b"\x1b[?25h" if os.isatty(2) else b""  # a progress bar hides it
    os.write(2, show_cursor + b"interrupted\n")
    os._exit(INTERRUPTED)


@contextmanager
def as_interrupt() -> Iterator[None]:
    """Raise KeyboardInterrupt inside the context on Ctrl-C and on SIGTERM, which `kill` and schedulers send.

    During an import a signal ends the process at once, since libraries may swallow the exception. The process also
    ends `GRACE` seconds after a SIGTERM, and soon after a second signal. Signals keep their handlers outside the main
    thread, and where they already have a handler of the caller.
    """
    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGTERM) not in (signal.SIG_DFL, leave):
        yield
        return
    before = {signal.SIGTERM: signal.signal(signal.SIGTERM, _stop)}
    if signal.getsignal(signal.SIGINT) in (signal.default_int_handler, leave):  # a shell ignores it for background jobs
        before[signal.SIGINT] = signal.signal(signal.SIGINT, _stop)
    source, sink = os.pipe()
    os.set_blocking(sink, False)
    old = signal.set_wakeup_fd(sink, warn_on_full_buffer=False)
    watcher = threading.Thread(target=_watch, args=(source,), daemon=True)
    watcher.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(old)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(sink)  # which ends the watcher
        watcher.join()
        os.close(source)


def _stop(number: int, frame: FrameType | None) -> None:
    """Interrupt the main thread. On SIGTERM also kill the workers: only Ctrl-C reaches them by itself."""
    if _importing(frame):
        leave()
    if number == signal.SIGTERM:
        _end_children()
    raise KeyboardInterrupt


_stop.stops_runs = True  # type: ignore[attr-defined]  # a run under way may be stored first: see `inference.infer`


def _watch(source: int) -> None:
    """End the process at its deadline. Runs in a thread, since the main thread may be inside a long library call."""
    deadline, count = float("inf"), 0
    while True:
        wait = None if deadline == float("inf") else max(0.0, deadline - time.monotonic())
        if not select.select([source], [], [], wait)[0]:
            leave()
        numbers = os.read(source, 64)
        if not numbers:  # closed
            return
        for number in numbers:
            if number in (signal.SIGINT, signal.SIGTERM):
                count += 1
                if count > 1 or number == signal.SIGTERM:
                    deadline = min(deadline, time.monotonic() + (GRACE if count == 1 else AT_ONCE))


def _importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def _end_children() -> None:
    multiprocessing = sys.modules.get("multiprocessing")
    for child in multiprocessing.active_children() if multiprocessing else ():
        with suppress(ProcessLookupError):  # it may have ended meanwhile
            os.kill(child.pid, signal.SIGKILL)  # workers of loky are listed too, and have no `kill`
