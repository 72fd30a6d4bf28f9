"""Work for other processes as bytes, and its answer: the result or the error, with the log messages."""

import logging
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from posterity.errors import BadFolder, Diverged, PosterityError

Line = tuple[str, int, str]
"""A logged line: the name of the logger, the level and the message."""


class Lost(PosterityError):
    """Work that could not be sent to or from a process, or whose process was killed."""


class Setting(NamedTuple):
    """The settings that a worker process shares with this one."""

    threads: int
    dtype: torch.dtype
    level: int

    @classmethod
    def here(cls, threads: int | None = None) -> "Setting":
        """Return the setting of this process, with `threads` threads if given."""
        level = logging.getLogger("posterity").getEffectiveLevel()
        return cls(threads or torch.get_num_threads(), torch.get_default_dtype(), level)

    def take(self) -> None:
        """Set up the present process with these settings."""
        torch.set_num_threads(self.threads)
        torch.set_default_dtype(self.dtype)
        logging.getLogger("posterity").setLevel(self.level)


def done(
    parcel: bytes, loads: Callable[[bytes], Any] = pickle.loads, dumps: Callable[[Any], bytes] = pickle.dumps
) -> bytes:
    """Do pickled work and return its answer, which `opened` reads.

    Work or a result that cannot be pickled, such as one of an interactive class, is a Lost.
    """
    with _listening() as lines:
        try:
            work = loads(parcel)
        except Exception as error:
            return dumps((lines, unsent(error), None))
        try:
            result, failure = work(), None
        except Exception as error:
            result, failure = None, _portable(error)
    try:
        return dumps((lines, result, failure))
    except Exception as error:
        return dumps((lines, unsent(error), None))


def opened(answer: bytes) -> Any:
    """Return the result of the work, or raise its error; what it logged is logged here."""
    lines, result, failure = pickle.loads(answer)
    for name, level, message in lines:
        logging.getLogger(name).log(level, "%s", message)
    if failure is not None:
        raise failure
    return result


def unsent(error: Exception) -> Lost:
    """Return the Lost of work that cannot be pickled."""
    return Lost(
        f"it cannot be sent to a process: {error_line(error)}. Define its parts in a file, or use Sequential()."
    )


def error_line(error: Exception) -> str:
    """Return an error on one line."""
    kind = "" if isinstance(error, (Diverged, BadFolder)) else f"{type(error).__name__}: "
    return f"{kind}{' '.join(str(error).split())}"


def _portable(error: Exception) -> Exception:
    """Return the error, or a PosterityError where it does not survive pickling."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        plain = PosterityError(error_line(error))
        plain.exit_code = getattr(error, "exit_code", plain.exit_code)
        return plain
    return error


class _Notes(logging.Handler):
    """Keeps log messages."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[Line] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((record.name, record.levelno, record.getMessage()))


@contextmanager
def _listening() -> Iterator[list[Line]]:
    """Keep the library's log messages inside the context instead of printing them in a worker."""
    logger, notes = logging.getLogger("posterity"), _Notes()
    before, logger.propagate = logger.propagate, False
    logger.addHandler(notes)
    try:
        yield notes.lines
    finally:
        logger.removeHandler(notes)
        logger.propagate = before
