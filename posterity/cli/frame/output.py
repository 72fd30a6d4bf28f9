"""Output of verbs: results on standard output, progress and errors on standard error."""

import codecs
import io
import json
import logging
import math
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
        """Take the message, and a hint what to do."""
        super().__init__(message)
        self.add_note(hint)


@contextmanager
def option_values(verb: str) -> Iterator[None]:
    """Turn the library's ValueError or TypeError into a `UsageError` of the command `verb`.

    The hint is the first note of the error, or else names the help of the command. A `PosterityError` is not changed.
    """
    from posterity.errors import PosterityError

    try:
        yield
    except PosterityError:
        raise
    except (ValueError, TypeError) as error:
        hints = (*getattr(error, "__notes__", ()), f"'posterity {verb} --help' lists the options and their values.")
        raise UsageError(str(error), hints[0]) from error


@contextmanager
def hint(kind: type[Exception], text: str) -> Iterator[None]:
    """Add a hint to errors of this kind."""
    try:
        yield
    except kind as error:
        error.add_note(text)
        raise


_ANY = 10_000  # columns


class Terminal(Console):
    """A console that prints a wide table in full, in lines longer than the terminal's, instead of cutting numbers.

    `soft_wrap` does not break lines in files and pipes; on a terminal it is ignored, so that lines break between words.
    """

    def print(self, *objects: Any, **options: Any) -> None:
        """Print; columns of tables that must not wrap get the width of their longest cell."""
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
    """Standard error while a progress bar has replaced it: lines go above the bar, where rich would bypass it."""

    def __init__(self, stream: TextIO) -> None:
        """Take the stream."""
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        """Return attributes of the stream, except the one by which rich finds the stream below it."""
        if name == "rich_proxied_file":
            raise AttributeError(name)
        return getattr(self._stream, name)


_SPELT = {"±": "+-", "…": "..."}


def console(*, stderr: bool = False) -> Console:
    """Return a rich console on standard output or error; with NO_COLOR set it prints no escape codes."""
    file: Any = _AboveBar(sys.stderr) if stderr else sys.stdout
    plain = bool(os.environ.get("NO_COLOR"))
    return Terminal(file=file, highlight=False, color_system=None if plain else "auto")


def finite(value: Any) -> Any:
    """Return a JSON value with None in place of numbers that JSON does not have."""
    if isinstance(value, dict):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def print_json(document: dict[str, Any], indent: int | None = 2) -> None:
    """Print the one JSON document of a command on standard output."""
    print(json.dumps(document, indent=indent, ensure_ascii=not _has_all_signs(sys.stdout), allow_nan=False))


def log(message: str, *, quiet: bool = False) -> None:
    """Print one line of progress on standard error."""
    if not quiet:
        _labelled(message, "", "dim")


def error_line(message: str) -> None:
    """Print `error: message` in one line on standard error."""
    _labelled(message, "error: ", "bold red")


def hint_line(message: str) -> None:
    """Print `hint: message` in one line on standard error."""
    _labelled(message, "hint: ", "bold")


def spell_out() -> None:
    """Replace characters that standard output and error cannot encode by ASCII, so that no command ends by them."""
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
    """Prints warnings of the library as lines of the command, above a progress bar."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a warning."""
        _labelled(record.getMessage(), "warning: ", "yellow")


@contextmanager
def shown_warnings() -> Iterator[None]:
    """Print the library's warnings inside the context, unless its log has a handler."""
    usual, logging.lastResort = logging.lastResort, _Warnings(logging.WARNING)
    try:
        yield
    finally:
        logging.lastResort = usual


@contextmanager
def one_thread() -> Iterator[None]:
    """Use one thread inside the context, unless OMP_NUM_THREADS is set: for small fits."""
    import torch

    threads = torch.get_num_threads()
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def table(first: str, *numbers: str, wrap: bool = True) -> Table:
    """Return an empty table with a column of words and columns of numbers, whose cells may `wrap`."""
    empty = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    empty.add_column(first, no_wrap=True)
    for heading in numbers:
        empty.add_column(heading, justify="right", no_wrap=not wrap)
    return empty
