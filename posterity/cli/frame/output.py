"""What a verb prints: results on standard output, progress and errors on standard error."""

import codecs
import io
import json
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text


class UsageError(Exception):
    """An option or argument that cannot be used as given; exit code 2. The hint is a note of the exception.

    Not a `PosterityError`, whose module needs torch.
    """

    exit_code = 2

    def __init__(self, message: str, hint: str) -> None:
        """Take what is wrong, and what to do about it."""
        super().__init__(message)
        self.add_note(hint)


@contextmanager
def option_values(verb: str) -> Iterator[None]:
    """Turn what the library says of a bad value into a `UsageError` of the command `verb`; leave its own errors.

    The hint is the first note of the error, or else where the options are listed.
    """
    from posterity.errors import PosterityError

    try:
        yield
    except PosterityError:
        raise
    except (ValueError, TypeError) as error:
        hints = (*getattr(error, "__notes__", ()), f"'posterity {verb} --help' lists the options and their values.")
        raise UsageError(str(error), hints[0]) from error


_ANY = 10_000  # columns


class Terminal(Console):
    """A console whose tables have lines longer than the terminal's rather than numbers cut short.

    `soft_wrap` keeps a line of a file or a pipe whole; on a terminal, which would cut it within a word, it goes on
    below.
    """

    def print(self, *objects: Any, **options: Any) -> None:
        """Print, with room for the longest words of tables."""
        if self.is_terminal:
            options.pop("soft_wrap", None)
        own, wide = self.width, self.options.update(width=_ANY)
        tables = [item for item in objects if isinstance(item, Table)]
        for column in (column for each in tables for column in each.columns if column.no_wrap):
            column.min_width = max(Measurement.get(self, wide, cell).maximum for cell in (column.header, *column.cells))
        needed = [Measurement.get(self, wide, table) for table in tables]
        if max((each.minimum for each in needed), default=0) <= own:
            super().print(*objects, **options)
            return
        self.width = max(each.maximum for each in needed)
        try:
            super().print(*objects, **options)
        finally:
            self.width = own


class _AboveBar:
    """A stream that a bar has replaced by its own, which rich would write past: lines go above the bar."""

    def __init__(self, stream: TextIO) -> None:
        """Take the stream."""
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        """All but the stream below."""
        if name == "rich_proxied_file":
            raise AttributeError(name)
        return getattr(self._stream, name)


_SPELT = {"±": "+-", "…": "..."}


def console(*, stderr: bool = False) -> Console:
    """A rich console on standard output or error, without any escape codes when NO_COLOR is set."""
    file: Any = _AboveBar(sys.stderr) if stderr else sys.stdout
    plain = bool(os.environ.get("NO_COLOR"))
    return Terminal(file=file, highlight=False, color_system=None if plain else "auto")


def print_json(document: dict[str, Any], indent: int | None = 2) -> None:
    """The one JSON document of a command, on standard output."""
    print(json.dumps(document, indent=indent, ensure_ascii=not _has_all_signs(sys.stdout), allow_nan=False))


def log(message: str, *, quiet: bool = False) -> None:
    """One line about the progress, on standard error."""
    if not quiet:
        _labelled(message, "", "dim")


def error_line(message: str) -> None:
    """`error: message` as one line on standard error."""
    _labelled(message, "error: ", "bold red")


def hint_line(message: str) -> None:
    """`hint: message` as one line on standard error."""
    _labelled(message, "hint: ", "bold")


def spell_out() -> None:
    """Let signs that standard output and error cannot encode, as in ASCII, be spelt out instead of ending a command."""
    codecs.register_error("posterity.spelt", _spelt)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and not _has_all_signs(stream):
            stream.reconfigure(errors="posterity.spelt")


def _has_all_signs(stream: TextIO) -> bool:
    return codecs.lookup(stream.encoding or "utf-8").name.startswith("utf")


def _spelt(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(_SPELT.get(sign, "?") for sign in error.object[error.start : error.end]), error.end


def _labelled(message: str, label: str, style: str) -> None:
    line = " ".join(message.split())
    text = Text.assemble((label, style), line) if label else Text(line, style)
    console(stderr=True).print(text, soft_wrap=True)


class _Warnings(logging.Handler):
    """Prints warnings of the library as lines of the command, above a bar and broken between words."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print one."""
        _labelled(record.getMessage(), "warning: ", "yellow")


@contextmanager
def shown_warnings() -> Iterator[None]:
    """Print what the library warns of, where nobody has given its log a handler."""
    usual, logging.lastResort = logging.lastResort, _Warnings(logging.WARNING)
    try:
        yield
    finally:
        logging.lastResort = usual


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread, as the fits are small; somebody who sets OMP_NUM_THREADS is left alone."""
    import torch

    threads = torch.get_num_threads()
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def table(first: str, *numbers: str, wrap: bool = True) -> Table:
    """An empty table with one column of words and further ones of numbers, whose text goes on in a next line or not."""
    empty = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    empty.add_column(first, no_wrap=True)
    for heading in numbers:
        empty.add_column(heading, justify="right", no_wrap=not wrap)
    return empty
