"""Peak memory of one call."""

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

MEBIBYTE = 2**20
_STATUS = Path("/proc/self/status")
_RESET = Path("/proc/self/clear_refs")


def peak_bytes(call: Callable[[], object]) -> int:
    """By how much the resident set of this process grows at most during `call()`, whoever allocates; Linux alone.

    Memory that the process has freed goes back to the system first, so that the call cannot use it unseen.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    _RESET.write_text("5")  # the kernel forgets the peak so far
    before = field("VmRSS")
    call()
    return max(0, field("VmHWM") - before)


def field(name: str) -> int:
    """Bytes of one line of this process's status, such as VmHWM, its own peak: ru_maxrss counts the parent's, too."""
    (line,) = (line for line in _STATUS.read_text().splitlines() if line.startswith(f"{name}:"))
    return 1024 * int(line.split()[1])
