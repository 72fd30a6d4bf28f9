"""Ctrl-C that waits for the end of a step."""

import logging
import signal
import threading
from types import FrameType, TracebackType

logger = logging.getLogger("posterity")


class Interrupt:
    """A context in which the first Ctrl-C only sets `came`; a second one interrupts at once.

    A step overwrites its state in place, so a state stored in the middle of one could not be resumed exactly. Leaves
    the signal alone where `wanted` is false, outside the main thread, and where somebody else handles it already.
    """

    def __init__(self, wanted: bool) -> None:
        """Nothing is changed before the context is entered."""
        self.came = False
        ours = wanted and threading.current_thread() is threading.main_thread()
        self._takes = ours and signal.getsignal(signal.SIGINT) is signal.default_int_handler

    def __enter__(self) -> "Interrupt":
        if self._takes:
            signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._takes:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.came:
            raise KeyboardInterrupt
        self.came = True
        logger.warning("interrupted: this step is finished and the run stored; press again to stop at once")
