"""Reading text files into columns of fields, and detecting a header."""

import codecs
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from posterity.datasets.arrow import compute
from posterity.datasets.columns import Column
from posterity.datasets.fields import MISSING, looks_numeric
from posterity.datasets.splitting import EMPTY, SEPARATORS, longest, named, problem, split_fields
from posterity.errors import BadData, shown, unknown

_MARKS = (  # byte order marks; UTF-32 before UTF-16, whose mark is a prefix
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


@dataclass(frozen=True, eq=False)
class Records:
    """The records of a file: columns of fields without surrounding spaces, and the line on which each record begins.

    Columns are Arrow arrays of strings. `notes` says in sentences what had to be decided.
    """

    path: Path
    separator: str
    columns: list[Any]
    lines: Any  # (N,) int64
    notes: list[str] = field(default_factory=list)


def read_records(data: bytes, path: Path, separator: str | None = None, encoding: str | None = None) -> Records:
    """Read the records of separated fields in the content of a file; raises BadData, with the line, if it is ambiguous.

    `separator` is one of `SEPARATORS`, by name or by sign. Without it the file is parsed with each sign that occurs
    in it, and exactly one must give all records the same number of fields, two or more; whitespace is tried only
    where no other sign occurs. Without `encoding` a byte order mark decides, then UTF-8, then Latin-1. Fields may be
    quoted by `"`, doubled inside; blank lines do not count.
    """
    given = None if separator is None else SEPARATORS.get(separator, separator)
    if given is not None and given not in SEPARATORS.values():
        raise ValueError(unknown("separator", given, SEPARATORS))
    data, notes = _utf8(data, path, encoding)
    present = [sign for sign in SEPARATORS.values() if sign != " " and sign.encode() in data]
    signs = [given] if given else present or [" "]
    fitting = {sign: fields for sign in signs if (fields := split_fields(data, sign))}
    if len(fitting) > 1:
        names = " and by ".join(map(named, fitting))
        raise BadData(f"{path}: the fields can be separated by {names}. Say by which (--separator).")
    if not fitting:
        raise BadData(f"{path}: {problem(data.decode(), signs)}")
    ((sign, (columns, lines, blanks)),) = fitting.items()
    if not any(map(longest, columns)):
        raise BadData(f"{path}: {EMPTY}")
    if rivals := [named(other) for other in signs if other != sign]:
        notes.append(f"Fields are separated by {named(sign)}, and may contain {' and '.join(rivals)}.")
    if blanks:
        notes.append(f"{blanks} blank line{'s' * (blanks > 1)} between the rows did not count.")
    return Records(path, sign, columns, lines, notes)


def _utf8(data: bytes, path: Path, encoding: str | None) -> tuple[bytes, list[str]]:
    """Return the text of a file in UTF-8 without a byte order mark, and notes on how it was found."""
    notes: list[str] = []
    mark = next((name for start, name in _MARKS if data.startswith(start)), None)
    if encoding or mark:
        data = _decoded(data, path, encoding or mark or "")
        data = data.removeprefix(codecs.BOM_UTF8)  # the codec that was asked for may leave the mark where it is
    elif not data.isascii() and not _is_utf8(data, path):
        data = _decoded(data, path, "latin-1")
        notes.append("The file is not UTF-8 and was read as Latin-1; say the encoding if it is another.")
    if b"\0" in data:
        line = data[: data.index(b"\0")].count(b"\n") + 1
        raise BadData(f"{path}: not a text file: line {line} has a NUL byte. Export the table as CSV in UTF-8.")
    return data, notes


def _decoded(data: bytes, path: Path, name: str) -> bytes:
    """Return text of an encoding in UTF-8."""
    try:
        return data.decode(name).encode()
    except LookupError as error:
        raise ValueError(f"read_table: unknown encoding '{name}'. Use utf-8, utf-16, latin-1 or cp1252.") from error
    except UnicodeError as error:
        line = data[: getattr(error, "start", 0)].count(b"\n") + 1
        raise BadData(f"{path}: line {line} is not {name}: {getattr(error, 'reason', error)}.") from error


def _is_utf8(data: bytes, path: Path) -> bool:
    """Return whether bytes without a mark are UTF-8; raises BadData where only some non-ASCII bytes are."""
    try:
        data.decode()
    except UnicodeDecodeError as error:
        if not data.decode(errors="ignore").isascii():
            line = data[: error.start].count(b"\n") + 1
            raise BadData(
                f"{path}: line {line}: byte {data[error.start]:02x} is not UTF-8, as the file is elsewhere. "
                "Correct it, or say the encoding (--encoding)."
            ) from error
        return False
    return True


_NUMBERED = re.compile(r"x[1-9][0-9]*")


def take_header(records: Records, header: bool | None, target: str | None) -> tuple[tuple[str, ...], bool, list[str]]:
    """Return the names of the columns, whether the first record gives them, and notes on what was decided.

    Without `header`, the first record names the columns if it has no number in it while the rest of some column
    is all numbers. Where no column is all numbers, it does unless the target is named like a column without a name
    (x1, x2, ...). Empty names become x1, x2, ... by position; duplicate names are refused.
    """
    pc = compute()
    first = [column[0].as_py() for column in records.columns]
    notes: list[str] = []
    if header is None:
        header = _is_header(records, first, target)
        if not header:
            notes.append(f"The first line is data: the columns are called x1 to x{len(first)}.")
    if not header:
        return tuple(f"x{index}" for index in range(1, len(first) + 1)), False, notes
    names = tuple(name or f"x{index}" for index, name in enumerate(first, start=1))
    for index, name in enumerate(first, start=1):
        if not name:
            notes.append(f"Column {index} has no name and is called 'x{index}'.")
    seen: dict[str, int] = {}
    for index, name in enumerate(names, start=1):
        if seen.setdefault(name, index) != index:
            raise BadData(
                f"{records.path}: line {records.lines[0]}: columns {seen[name]} and {index} have the same name "
                f"{shown(name)}. Give every column its own."
            )
    again = np.ones(len(records.lines), dtype=bool)
    for column, name in zip(records.columns, first, strict=True):
        again &= pc.equal(column, name).to_numpy(zero_copy_only=False)
        if again.sum() == 1:
            break
    else:
        raise BadData(f"{records.path}: line {records.lines[again][1]} names the columns again. Remove it.")
    return names, True, notes


def _is_header(records: Records, first: list[str], target: str | None) -> bool:
    numeric = [index for index, name in enumerate(first) if looks_numeric(name)]
    below = (index for index, name in enumerate(first) if not looks_numeric(name) and _numbers_below(records, index))
    text = next(below, None)
    if numeric and text is not None:
        raise BadData(
            f"{records.path}: line {records.lines[0]} has the number {shown(first[numeric[0]])} in column "
            f"{numeric[0] + 1} and the text {shown(first[text])} in column {text + 1}, where all other lines "
            "have numbers: it may name the columns or be damaged. Say which (--header or --no-header)."
        )
    if numeric or text is not None:
        return text is not None
    return target is None or target in first or not _NUMBERED.fullmatch(target)


def _numbers_below(records: Records, index: int) -> bool:
    """Return whether a column begins with text and then has numbers only, at least one."""
    if records.columns[index][0].as_py() in MISSING:
        return False
    column = Column(records.path, "", records.columns[index][1:], records.lines[1:])
    if column.missing.all():
        return False
    return column.is_number(".") or all(map(looks_numeric, column.words))
