"""Splitting text into fields: by Arrow where quotes are simple, else by Python's csv module, which is strict.

Arrow would take quotes that are never closed, or text after a closing quote, in its own way. So it is handed only text
whose quotes stand around whole fields and hold no line ends. The csv module is ten times slower, reads the rest, and
says what is wrong where a text is no table.
"""

import csv
import io
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from posterity.datasets.arrow import compute, pool

SEPARATORS = {"comma": ",", "semicolon": ";", "tab": "\t", "pipe": "|", "whitespace": " "}
"""Separators by name; "whitespace" is any run of spaces and tabs."""

SPACES = " \t\u00a0"
"""Characters stripped from both ends of a field."""

_TOKEN = re.compile(r'[ \t]*(?:"((?:[^"]|"")*)"|([^ \t"\r\n][^ \t\r\n]*))(?=[ \t\r\n]|$)')
EMPTY = "the file is empty. A table needs a line of column names and rows."
_PIECE = 1 << 22  # bytes looked at or parsed at a time


class Fields(NamedTuple):
    """Columns of fields as Arrow strings in chunks, the line on which each record begins (N,), and the blank lines."""

    columns: list[Any]
    lines: Any
    blanks: int


def split_fields(data: bytes, separator: str) -> Fields | None:
    """Return the fields of a text in UTF-8; None unless each record has as many, two or more, and quotes are right."""
    if _is_simple(data, separator):
        fields = _by_arrow(data, separator)
        if fields is None or max(map(longest, fields.columns)) <= csv.field_size_limit():
            return fields
    parse = _parsed(data.decode(), separator)
    if parse.problem or parse.share != 1:
        return None
    import pyarrow as pa

    columns = [pa.array(column, pa.string()) for column in zip(*parse.rows, strict=True)]
    return Fields(columns, np.array(parse.lines), parse.blanks)


def longest(column: Any) -> int:
    """Return the number of bytes of the longest field."""
    pc = compute()
    return pc.max(pc.binary_length(column)).as_py() or 0


def _positions(data: bytes, letter: bytes) -> Any:
    """Return the places of a byte."""
    letters = np.frombuffer(data, dtype=np.uint8)
    pieces = range(0, len(letters), _PIECE)
    positions = [np.flatnonzero(letters[start : start + _PIECE] == ord(letter)) + start for start in pieces]
    return np.concatenate(positions) if positions else np.empty(0, dtype=np.int64)


def _is_simple(data: bytes, separator: str) -> bool:
    """Return whether quotes, if there are any, stand around whole fields without line ends, doubled inside."""
    if b'"' not in data:
        return separator != " " or b"\xc2\xa0" not in data
    quotes = _positions(data, b'"')
    if separator == " " or len(quotes) % 2:
        return False
    letters, ends = np.frombuffer(data, dtype=np.uint8), np.frombuffer(f'{separator}\r\n"'.encode(), dtype=np.uint8)
    opened, closed = quotes[::2], quotes[1::2]
    before, after = letters[opened[opened > 0] - 1], letters[closed[closed + 1 < len(data)] + 1]
    if not (np.isin(before, ends).all() and np.isin(after, ends).all()):
        return False
    lines = (_positions(data, end) for end in (b"\n", b"\r"))
    return not any((np.searchsorted(quotes, places) % 2).any() for places in lines)


def _by_arrow(data: bytes, separator: str) -> Fields | None:
    import pyarrow as pa
    from pyarrow import csv as arrow

    pc = compute()
    if b"\r" in data:
        data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    if separator == " ":
        data = re.sub(rb"[ \t]+", b" ", data).replace(b" \n", b"\n").replace(b"\n ", b"\n").strip(b" ")
    ends = _positions(data, b"\n")
    data, lines, blanks = _without_blanks(data, ends, separator)
    head = data[: data.find(b"\n")] if b"\n" in data else data
    count = len(next(_separated(head.decode(), separator, _Parse()), ((), 0))[0])
    if count < 2:
        return None
    names = [str(place) for place in range(count)]
    quoted = b'"' in data
    spaces = b" " in data or b"\xc2\xa0" in data or (b"\t" in data and (separator != "\t" or quoted))
    size = max(_PIECE, 2 * len(head), 2 * int(np.diff(ends).max(initial=0)))  # a line must fit into a block
    read = arrow.ReadOptions(column_names=names, block_size=size, use_threads=False)
    parse = arrow.ParseOptions(delimiter=separator, quote_char='"' if quoted else False, ignore_empty_lines=False)
    convert = arrow.ConvertOptions(column_types=dict.fromkeys(names, pa.string()), check_utf8=False)
    try:
        table = arrow.read_csv(pa.py_buffer(data), read, parse, convert, pool())
    except pa.ArrowInvalid:  # some record has more or fewer fields
        return None
    columns = [pc.utf8_trim(column, SPACES) if spaces else column for column in table.columns]
    return Fields(columns, np.arange(1, len(columns[0]) + 1) if lines is None else lines, blanks)


def _without_blanks(data: bytes, ends: Any, separator: str) -> tuple[bytes, Any, int]:
    """Return text without blank lines, the lines that are left (None for all), and how many between them were blank.

    `ends` are the places of line ends.
    """
    spaces = SPACES.replace(separator if separator == "\t" else "", "").encode()  # in UTF-8 these bytes make no other
    starts = np.append(0, ends + 1)
    if starts[-1] == len(data):  # after the last line
        starts = starts[:-1]
    first = np.frombuffer(data, dtype=np.uint8)[starts]
    doubtful = starts[np.isin(first, np.frombuffer(spaces + b"\n", dtype=np.uint8))].tolist()
    stops = np.append(ends, len(data))[np.searchsorted(ends, doubtful)].tolist()
    if all(data[start:stop].strip(spaces) for start, stop in zip(doubtful, stops, strict=True)):
        return data, None, 0
    lines = data.split(b"\n")
    kept = [place for place, line in enumerate(lines) if line.strip(spaces)]
    blanks = kept[-1] - kept[0] + 1 - len(kept) if kept else 0
    return b"\n".join(lines[place] for place in kept), np.array(kept) + 1, blanks


@dataclass(eq=False)
class _Parse:
    """The text parsed with one separator; `problem` says which quotes are wrong."""

    rows: list[list[str]] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    blanks: int = 0
    problem: str = ""

    @property
    def share(self) -> float:
        """Share of records with the most common number of fields; 0 where that is 1."""
        count, times = Counter(map(len, self.rows)).most_common(1)[0] if self.rows else (0, 0)
        return times / len(self.rows) if count > 1 else 0.0


def _parsed(text: str, separator: str) -> _Parse:
    parse, blanks = _Parse(), 0
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


def problem(text: str, separators: Sequence[str]) -> str:
    """Return why a text is no table under any of these separators, for the separator that fits most records."""
    parses = [(_parsed(text, separator), separator) for separator in separators]
    parse, separator = max(parses, key=lambda pair: pair[0].share)
    if parse.problem:
        return parse.problem
    if not parse.rows:
        return EMPTY
    count = len(parse.rows[0])
    others = [index for index, row in enumerate(parse.rows) if len(row) != count]
    if not others:
        return (
            f"line {parse.lines[0]} has one field only. A table needs a target and an input column. "
            "If the fields are separated by another sign, say so (--separator)."
        )
    first = others[0]
    message = (
        f"line {parse.lines[first]} has {_count(len(parse.rows[first]))} where line {parse.lines[0]} "
        f"has {_count(count)}, separated by {named(separator)}"
    )
    same = {len(parse.rows[index]) for index in others}
    if len(others) > 1 and len(others) == len(parse.rows) - 1 and len(same) == 1:
        return message + ", and so has every line after the first. Name every column there, row names too."
    more = f" ({len(others) - 1} more such)" if len(others) > 1 else ""
    return f"{message}{more}. Give every line as many; quote fields that hold the separator."


def _count(count: int) -> str:
    return f"{count} field{'s' * (count != 1)}"


def named(separator: str) -> str:
    """Return the name of a separator."""
    return next(name for name, sign in SEPARATORS.items() if sign == separator)
