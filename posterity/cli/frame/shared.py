"""A command that torchrun has started in several processes, which share its fits."""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout

SHARED = ("fit", "compare", "study")  # the verbs that fit; any other is the work of the first process
PATIENCE = 86400.0  # seconds for which a process waits while another one fits alone; one that dies is missed at once
LATER = 1.0  # seconds by which the first process says its error before the others end, upon which torchrun ends all


def rank() -> int:
    """Return the number of this process among those of torchrun; 0 in a process that it did not start."""
    return int(os.environ.get("RANK", "0")) if "TORCHELASTIC_RUN_ID" in os.environ else 0


@contextmanager
def joined(arguments: Sequence[str]) -> Iterator[bool]:
    """Join the other processes of torchrun, if any; yields whether this process has a part in the command.

    The first process alone prints. An error that it has too is left to it: `said` is set.
    """
    verb = next((word for word in arguments if not word.startswith("-")), "")
    if "TORCHELASTIC_RUN_ID" not in os.environ or verb not in SHARED or "--help" in arguments or "-h" in arguments:
        yield rank() == 0
        return
    from posterity import scale

    silent = open(os.devnull, "w") if rank() else nullcontext()  # noqa: SIM115  closed below
    with silent as nowhere, scale.join(timeout=PATIENCE, reads_together=True):
        if nowhere is None:
            yield True
        else:
            with redirect_stdout(nowhere), redirect_stderr(nowhere):
                yield True


def said_by_first(error: Exception) -> bool:
    """Return whether the first process says this error of another one, and give it the time to do so."""
    said = rank() > 0 and getattr(error, "said_by_first", False)
    if said:
        time.sleep(LATER)
    return said
