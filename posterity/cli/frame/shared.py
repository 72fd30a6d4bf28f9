"""Commands that torchrun starts in several processes, which share each fit."""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout

SHARED = ("fit", "compare", "study")  # the verbs that fit; only the first process runs another verb
PATIENCE = 86400.0  # seconds that processes wait while the first fits alone; the death of a process is noticed at once
LATER = 1.0  # seconds for the first process to print its error before another ends, since torchrun then kills all


def rank() -> int:
    """Return the rank of this process; 0 if torchrun did not start it."""
    return int(os.environ.get("RANK", "0")) if "TORCHELASTIC_RUN_ID" in os.environ else 0


@contextmanager
def joined(arguments: Sequence[str]) -> Iterator[bool]:
    """Join the other processes of torchrun, if any; yield whether this process takes part in the command.

    Only the first process prints. It also prints the errors that all processes raise (see `said_by_first`).
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
    """Return whether the first process prints this error too; if so wait until it has."""
    said = rank() > 0 and getattr(error, "said_by_first", False)
    if said:
        time.sleep(LATER)
    return said
