"""Where output goes: results to standard output, everything else to standard error."""

import codecs
import io
import json
import os
import sys
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console

_SPELT = {"±": "+-", "…": "..."}


def console(*, stderr: bool = False) -> "Console":
    """A rich console on standard output or error, without any escape codes when NO_COLOR is set."""
    from posterity.cli.terminal import Terminal

    file = sys.stderr if stderr else sys.stdout
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
    from rich.text import Text

    line = " ".join(message.split())
    text = Text.assemble((label, style), line) if label else Text(line, style)
    console(stderr=True).print(text, soft_wrap=True)
