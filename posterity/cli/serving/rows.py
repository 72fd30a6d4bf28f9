"""Reading of requests: JSON or CSV to encoded inputs, with a message for each row that cannot be read."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch

from posterity.cli.frame.folders import Run
from posterity.cli.frame.options import LEVEL, ReadingOptions
from posterity.cli.frame.outside import outside
from posterity.cli.frame.sources import Source, num_inputs, source_of_table
from posterity.cli.serving.few import FewRows
from posterity.datasets import DataSet, LabelledData, Table, as_table, read_table
from posterity.datasets.columns import Column
from posterity.errors import BadData, PosterityError, shown
from posterity.options import describe

MOST_SENTENCES = 100
"""Most faulty rows of a request that get a message."""
_PACKED = (b"PK\x03\x04", b"\x1f\x8b", b"PAR1")  # first bytes of zip (and Excel), gzip and Parquet
_NAME, _FRAME = Path("rows"), Path("table")


class Refused(Exception):
    """A request that is refused with a status and a message, and a message for each faulty row."""

    def __init__(self, status: int, sentence: str, rows: Sequence[tuple[int, str]] = ()) -> None:
        """Take the status, the message, and faulty rows (index from 0, message)."""
        super().__init__(sentence)
        self.status, self.rows = status, rows


class EncodedRows(NamedTuple):
    """The encoded rows (N, D) of a request, their outside columns, the reader's notes, and the level of intervals."""

    inputs: torch.Tensor
    outside: list[str] | None
    notes: tuple[str, ...]
    level: float

    def __len__(self) -> int:
        return self.inputs.shape[0]


class Reader:
    """Reads the bodies of requests for a run."""

    def __init__(self, run: Run, most_rows: int) -> None:
        """Take the run, and the most rows of a request."""
        self._run, self._most_rows = run, most_rows
        fitted = run.preprocessing
        columns = [column.name for column in fitted.inputs] if fitted is not None else []
        self.columns = list(dict.fromkeys(columns)) or [f"x{i}" for i in range(1, num_inputs(run.config) + 1)]
        self._few = FewRows(run, self.columns)

    def read(self, body: bytes, kind: str, level: str | None) -> EncodedRows:
        """Read a body of content type `kind`; `level` is the query parameter."""
        wanted: Any = None if level is None else _number(level) or level
        if kind == "text/csv":
            encoded = self._judged(self._from_text(body))
        else:
            columns, own = self._json(body)
            wanted = own if wanted is None else wanted
            encoded = self._few.encoded(columns) or self._judged(self._from_columns(columns))
        wanted = LEVEL if wanted is None else wanted
        if isinstance(wanted, bool) or not isinstance(wanted, (int, float)) or not 0 < wanted < 1:
            raise Refused(422, f"level must be a number between 0 and 1. Got {shown(wanted)}.")
        return EncodedRows(*encoded, float(wanted))

    def _judged(self, source: Source) -> tuple[torch.Tensor, list[str] | None, tuple[str, ...]]:
        return source.data.test.inputs, outside(self._run.reach, source), source.notes

    def _json(self, body: bytes) -> tuple[dict[str, list[Any]], Any]:
        """Return the columns and the level of a JSON body."""
        try:
            document = _DECODER.decode(body.decode())
        except (ValueError, RecursionError) as error:
            reason = str(error) if isinstance(error, (json.JSONDecodeError, _Constant)) else "it cannot be decoded"
            raise Refused(422, f"The body must be JSON in UTF-8: {reason[:200]}.") from None
        if isinstance(document, list):
            return self._of_objects(document), None
        if not isinstance(document, dict) or ("rows" in document) == ("columns" in document):
            raise Refused(
                422,
                'The body must be a list of objects, or {"rows": [{...}, ...]}, or {"columns": {name: [...], ...}}. '
                f"Got {_kind(document)}.",
            )
        if further := sorted(document.keys() - {"rows", "columns", "level"}):
            raise Refused(422, f"Unknown key {shown(further[0])}. Beside rows or columns there may be level.")
        level = document.get("level")
        if "columns" in document:
            return self._of_columns(document["columns"]), level
        return self._of_objects(document["rows"]), level

    def _of_objects(self, rows: Any) -> dict[str, list[Any]]:
        if not isinstance(rows, list):
            raise Refused(422, f"rows must be a list of objects. Got {_kind(rows)}.")
        self._check_count(len(rows))
        wrong: list[tuple[int, str]] = []
        for index, row in enumerate(rows):
            if not isinstance(row, dict):
                wrong.append((index, f"It must be an object with a value for each column. Got {_kind(row)}."))
            elif missing := [name for name in self.columns if name not in row]:
                wrong.append((index, f"It has no {shown(missing[0])}. Give null where a value is missing."))
            elif bad := [name for name, value in row.items() if not _is_plain(name, value)]:
                wrong.append((index, f"{shown(bad[0])} must be a number, text, true, false or null."))
        if wrong:
            _refuse(wrong)
        names = dict.fromkeys(name for row in rows for name in row)
        return {name: [row.get(name) for row in rows] for name in names}

    def _of_columns(self, columns: Any) -> dict[str, list[Any]]:
        if not isinstance(columns, dict) or not all(isinstance(values, list) for values in columns.values()):
            raise Refused(422, f"columns must be an object of lists. Got {_kind(columns)}.")
        if missing := [name for name in self.columns if name not in columns]:
            raise Refused(422, f"There is no column {shown(missing[0])}. The run needs {', '.join(self.columns)}.")
        counts = {len(values) for values in columns.values()}
        if len(counts) > 1:
            raise Refused(422, f"All columns must have the same number of rows. Got {sorted(counts)}.")
        self._check_count(counts.pop())
        wrong = {
            index: f"{shown(name)} must be a number, text, true, false or null."
            for name, values in columns.items()
            for index, value in enumerate(values)
            if not _is_plain(name, value)
        }
        if wrong:
            _refuse(sorted(wrong.items()))
        return columns

    def _check_count(self, count: int) -> None:
        if not 0 < count <= self._most_rows:
            raise Refused(413 if count else 422, f"A request must have 1 to {self._most_rows:,} rows. Got {count:,}.")

    def _from_text(self, body: bytes) -> Source:
        try:
            text = body.decode("utf-8-sig")
        except UnicodeDecodeError:
            raise Refused(422, "The body must be CSV in UTF-8, and cannot be decoded. Save it as UTF-8.") from None
        if body.startswith(_PACKED) or "\0" in text:
            raise Refused(422, "The body must be plain CSV, and it is packed or binary. Unpack it.")
        ends = min(text.count("\n"), text.count("\r") or len(text))  # line ends, of which the first closes the names
        self._check_count(max(1, ends - 1) if text.strip() else 0)
        how = {name: self._run.config.get(name) for name in describe(ReadingOptions)}
        try:
            table = read_table(_NAME, data=body, **{**how, "encoding": None})  # type: ignore[arg-type]  # checked there
        except PosterityError as error:
            raise Refused(422, str(error)) from None
        self._check_count(len(table))
        return self._encoded(table)

    def _from_columns(self, columns: Mapping[str, list[Any]]) -> Source:
        if self._run.preprocessing is None:
            return self._plain(columns)
        try:
            return self._encoded(_table(columns))
        except PosterityError as error:
            raise Refused(422, str(error)) from None

    def _encoded(self, table: Table) -> Source:
        """Encode the rows of a table as in the run."""
        fitted = self._run.preprocessing
        if fitted is None:
            return self._plain({name: list(table.column(name).fields) for name in table.names})

        def encode(part: Table) -> Source:
            return source_of_table(part, _NAME, fitted, targets=False)

        try:
            return encode(table)
        except BadData as error:
            wrong = _faults(table, encode)
            if len(wrong) == len(table) and len({sentence for _, sentence in wrong}) == 1:  # no single row is at fault
                raise Refused(422, str(error)) from None
            _refuse(wrong)

    def _plain(self, columns: Mapping[str, Sequence[Any]]) -> Source:
        """Return the rows for a run on a built-in data set, whose inputs are the numbers x1, x2, ..."""
        if missing := [name for name in self.columns if name not in columns]:
            raise Refused(422, f"There is no column {shown(missing[0])}. The run needs {', '.join(self.columns)}.")
        values = [[_number(value) for value in columns[name]] for name in self.columns]
        wrong = {
            index: f"{shown(name)} must be a finite number. Got {shown(columns[name][index])}."
            for name, own in zip(self.columns, values, strict=True)
            for index, value in enumerate(own)
            if value is None
        }
        if wrong:
            _refuse(sorted(wrong.items()))
        inputs = torch.tensor(values, dtype=torch.float32).T.contiguous()
        classes = self._run.config["classes"]
        targets = torch.zeros(len(inputs), dtype=torch.int64 if classes else inputs.dtype)
        rows = LabelledData(inputs, targets)
        task = self._run.config["task"]
        return Source(DataSet("rows", task, rows, rows, tuple(classes) if classes else None))


def _table(columns: Mapping[str, list[Any]]) -> Table:
    """Return the table that `as_table` would make of these columns; plain values need no Arrow arrays."""
    import pyarrow as pa

    from posterity.datasets.frames import array_of

    lines = np.arange(len(next(iter(columns.values()))))
    plain = [Column.of_values(_FRAME, name, values, lines) for name, values in columns.items()]
    if None in plain:
        return as_table(pa.table({name: array_of(values) for name, values in columns.items()}))
    return Table(_FRAME, tuple(columns), tuple(filter(None, plain)), "", named=True)


class _Constant(ValueError):
    """NaN or Infinity in JSON."""


def _refuse_constant(word: str) -> NoReturn:
    raise _Constant(f"{word} is no number there; give null where a value is missing")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def _is_plain(name: str, value: Any) -> bool:
    """Return whether the name and the value can stand in a table."""
    try:
        name.encode()
        if isinstance(value, str):
            value.encode()
    except UnicodeEncodeError:  # a lone surrogate
        return False
    return value is None or isinstance(value, (str, int, float))


def _number(value: Any) -> float | None:
    """Return the value as a finite float32 number, or None."""
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) and abs(number) <= torch.finfo(torch.float32).max else None


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def _faults(table: Table, encode: Callable[[Table], Source]) -> list[tuple[int, str]]:
    """Find the first rows that cannot be encoded, with their messages, by bisection."""
    wrong: list[tuple[int, str]] = []
    parts = [range(len(table))]
    while parts and len(wrong) < MOST_SENTENCES:
        part = parts.pop()
        try:
            encode(table.rows(list(part)))
        except BadData as error:
            if len(part) == 1:
                wrong.append((part[0], str(error)))
            else:
                middle = len(part) // 2
                parts += [part[middle:], part[:middle]]
    return wrong


def _refuse(wrong: Sequence[tuple[int, str]]) -> NoReturn:
    counted = f"{len(wrong)} row{'s' * (len(wrong) > 1)}" if len(wrong) < MOST_SENTENCES else "Many rows"
    raise Refused(422, f"{counted} cannot be read; 'rows' says why for each.", wrong[:MOST_SENTENCES])
