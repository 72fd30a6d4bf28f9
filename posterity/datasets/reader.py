"""Reading text files into records of fields, and detecting a header."""

import codecs
import csv
import io
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from posterity.datasets.fields import MISSING, looks_numeric
from posterity.datasets.files import content
from posterity.errors import BadData, shown, unknown

SEPARATORS = {"comma": ",", "semicolon": ";", "tab": "\t", "pipe": "|", "whitespace": " "}
"""Separators by name; "whitespace" is any run of spaces and tabs."""

SPACES = " \t\u00a0"
"""Characters stripped from both ends of a field."""

_TOKEN = re.compile(r'[ \t]*(?:"((?:[^"]|"")*)"|([^ \t"\r\n][^ \t\r\n]*))(?=[ \t\r\n]|$)')
_MARKS = (  # byte order marks; UTF-32 before UTF-16, whose mark is a prefix
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_PACKED = (
    (b"PK\x03\x04", "a spreadsheet or zip archive. Export it as CSV"),
    (b"\x1f\x8b", "a gzip archive. Unpack it first"),
    (b"\xd0\xcf\x11\xe0", "an old spreadsheet. Export it as CSV"),
    (b"PAR1", "a Parquet file. Export it as CSV"),
)


@dataclass(frozen=True, eq=False)
class Records:
    """The records of a file: their fields without surrounding spaces, and the line on which each begins.

    All records have the same number of fields. `notes` says in sentences what had to be decided.
    """

    path: Path
    separator: str
    rows: list[list[str]]
    lines: list[int]
    notes: list[str] = field(default_factory=list)


def read_records(path: str | Path, separator: str | None = None, encoding: str | None = None) -> Records:
    """Read the records of a text file of separated fields; raises BadData, with the line, for an ambiguous file.

    `separator` is one of `SEPARATORS`, by name or by sign. Without it the file is parsed with each sign that occurs
    in it, and exactly one must give all records the same number of fields, two or more; whitespace is tried only
    where no other sign occurs. Without `encoding` a byte order mark decides, then UTF-8, then Latin-1. Fields may be
    quoted by `"`, doubled inside; blank lines do not count.
    """
    path = Path(path)
    given = None if separator is None else SEPARATORS.get(separator, separator)
    if given is not None and given not in SEPARATORS.values():
        raise ValueError(unknown("separator", given, SEPARATORS))
    text, notes = _text(content(path), path, encoding)
    parse = _parsed(text, given) if given else _detected(text, path)
    _check(parse, path)
    if given is None and parse.rivals:
        notes.append(f"The separator is {_said(parse.separator)}. Taken as parts of fields: {', '.join(parse.rivals)}.")
    if parse.blanks:
        notes.append(f"{parse.blanks} blank line{'s' * (parse.blanks > 1)} between the rows did not count.")
    return Records(path, parse.separator, parse.rows, parse.lines, notes)


def _text(data: bytes, path: Path, encoding: str | None) -> tuple[str, list[str]]:
    for start, what in _PACKED:
        if data.startswith(start):
            raise BadData(f"{path}: not a text file but {what}.")
    notes: list[str] = []
    mark = next((name for start, name in _MARKS if data.startswith(start)), None)
    if encoding is None and mark is None:
        encoding = "utf-8"
        if not _is_utf8(data, path):
            encoding = "latin-1"
            notes.append("The file is not UTF-8 and was read as Latin-1; say the encoding if it is another.")
    name = encoding or mark or ""
    try:
        text = data.decode(name)
    except LookupError as error:
        raise ValueError(f"read_table: unknown encoding '{name}'. Use utf-8, utf-16, latin-1 or cp1252.") from error
    except UnicodeError as error:
        line = data[: getattr(error, "start", 0)].count(b"\n") + 1
        raise BadData(f"{path}: line {line} is not {name}: {getattr(error, 'reason', error)}.") from error
    if encoding and mark:  # the codec that was asked for may leave the mark where it is
        text = text.removeprefix("\ufeff")
    if "\0" in text:
        line = text[: text.index("\0")].count("\n") + 1
        raise BadData(f"{path}: not a text file: line {line} has a NUL byte. Export the table as CSV in UTF-8.")
    return text, notes


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


@dataclass(eq=False)
class _Parse:
    """The text parsed with one separator; `problem` says which quotes are wrong."""

    separator: str
    rows: list[list[str]] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    blanks: int = 0
    problem: str = ""
    rivals: list[str] = field(default_factory=list)

    @property
    def usual(self) -> tuple[int, int]:
        """The most common number of fields, and how many records have it."""
        return Counter(map(len, self.rows)).most_common(1)[0] if self.rows else (0, 0)

    @property
    def share(self) -> float:
        """Share of records with the most common number of fields; 0 where that is 1."""
        count, times = self.usual
        return times / len(self.rows) if count > 1 else 0.0


def _detected(text: str, path: Path) -> _Parse:
    signs = [sign for sign in SEPARATORS.values() if sign != " " and sign in text] or [" "]
    parses = [_parsed(text, sign) for sign in signs]
    fitting = [parse for parse in parses if not parse.problem and parse.share == 1]
    if len(fitting) > 1:
        names = " and by ".join(_said(parse.separator) for parse in fitting)
        raise BadData(f"{path}: the fields can be separated by {names}. Say by which (--separator).")
    best = fitting[0] if fitting else max(parses, key=lambda parse: parse.share)
    best.rivals = [_said(sign) for sign in signs if sign != best.separator]
    return best


def _parsed(text: str, separator: str) -> _Parse:
    parse, blanks = _Parse(separator), 0
    source = _spaced(text, parse) if separator == " " else _separated(text, separator, parse)
    for fields, line in source:
        if not fields or (len(fields) == 1 and not fields[0].strip(SPACES)):
            blanks += 1
            continue
        if parse.rows:
            parse.blanks += blanks
        blanks = 0
        parse.rows.append([value.strip(SPACES) for value in fields])
        parse.lines.append(line)
    return parse


def _separated(text: str, separator: str, parse: _Parse) -> Iterator[tuple[list[str], int]]:
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True, skipinitialspace=True)
    line = 1
    try:
        for fields in reader:
            yield fields, line
            line = reader.line_num + 1
    except csv.Error as error:
        problem = f'{error}. Is a quote (") never closed?'
        if "end of data" in str(error):
            problem = 'a quote (") is opened and never closed.'
        elif "expected after" in str(error):
            problem = 'text follows a closing quote ("). Quote whole fields, and double the quotes inside them.'
        parse.problem = f"line {line}: {problem}"


def _spaced(text: str, parse: _Parse) -> Iterator[tuple[list[str], int]]:
    for line, row in enumerate(io.StringIO(text, newline=""), start=1):
        fields, end, rest = [], 0, row.rstrip(" \t\r\n")
        while end < len(rest) and (token := _TOKEN.match(rest, end)):
            fields.append(token[2] if token[1] is None else token[1].replace('""', '"'))
            end = token.end()
        if end < len(rest):
            parse.problem = f"line {line}: the quotes do not fit. Quote whole fields, and double quotes inside them."
            return
        yield fields, line


def _check(parse: _Parse, path: Path) -> None:
    if parse.problem:
        raise BadData(f"{path}: {parse.problem}")
    if not any(map(any, parse.rows)):
        raise BadData(f"{path}: the file is empty. A table needs a line of column names and rows.")
    count = len(parse.rows[0])
    others = [index for index, row in enumerate(parse.rows) if len(row) != count]
    if not others and count == 1:
        raise BadData(
            f"{path}: line {parse.lines[0]} has one field only. A table needs a target and an input column. "
            "If the fields are separated by another sign, say so (--separator)."
        )
    if not others:
        return
    first = others[0]
    message = (
        f"{path}: line {parse.lines[first]} has {_fields(len(parse.rows[first]))} where line {parse.lines[0]} "
        f"has {_fields(count)}, separated by {_said(parse.separator)}"
    )
    same = {len(parse.rows[index]) for index in others}
    if len(others) > 1 and len(others) == len(parse.rows) - 1 and len(same) == 1:
        message += ", and so has every line after the first. Name every column there, row names too."
    else:
        more = f" ({len(others) - 1} more such)" if len(others) > 1 else ""
        message += f"{more}. Give every line as many; quote fields that hold the separator."
    raise BadData(message)


def _fields(count: int) -> str:
    return f"{count} field{'s' * (count != 1)}"


def _said(sign: str) -> str:
    return next(name for name, known in SEPARATORS.items() if known == sign)


_NUMBERED = re.compile(r"x[1-9][0-9]*")


def take_header(records: Records, header: bool | None, target: str | None) -> tuple[tuple[str, ...], bool, list[str]]:
    """Return the names of the columns, whether the first record gives them, and notes on what was decided.

    Without `header`, the first record names the columns if it has no number in it while the rest of some column
    is all numbers. Where no column is all numbers, it does unless the target is named like a column without a name
    (x1, x2, ...). Empty names become x1, x2, ... by position; duplicate names are refused.
    """
    first = records.rows[0]
    notes: list[str] = []
    if header is None:
        header = _is_header(records, target)
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
    for row, line in zip(records.rows[1:], records.lines[1:], strict=True):
        if row == first:
            raise BadData(f"{records.path}: line {line} names the columns again. Remove it.")
    return names, True, notes


def _is_header(records: Records, target: str | None) -> bool:
    first, rest = records.rows[0], records.rows[1:]
    numeric = [index for index, name in enumerate(first) if looks_numeric(name)]
    names = [index for index, name in enumerate(first) if index not in numeric and _numbers_below(name, index, rest)]
    if numeric and names:
        raise BadData(
            f"{records.path}: line {records.lines[0]} has the number {shown(first[numeric[0]])} in column "
            f"{numeric[0] + 1} and the text {shown(first[names[0]])} in column {names[0] + 1}, where all other lines "
            "have numbers: it may name the columns or be damaged. Say which (--header or --no-header)."
        )
    if numeric or names:
        return bool(names)
    return target is None or target in first or not _NUMBERED.fullmatch(target)


def _numbers_below(name: str, index: int, rows: Sequence[Sequence[str]]) -> bool:
    """Return whether a column begins with text and then has numbers only, at least one."""
    if name in MISSING:
        return False
    values = [row[index] for row in rows if row[index] not in MISSING]
    return bool(values) and all(map(looks_numeric, values))
