"""Columns of strings as a file writes them, or of typed values, and their numbers."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from posterity.datasets import dates
from posterity.datasets.arrow import compute, pool
from posterity.datasets.fields import (
    CODE,
    COMMA,
    GROUPED,
    LARGEST_WHOLE,
    MISSING,
    POINT,
    SIGNS,
    THOUSANDS,
    around,
    grouped,
    number,
    trouble,
)
from posterity.errors import BadData, shown


@dataclass(frozen=True, eq=False)
class Column:
    """A named column of an Arrow array: strings as written in a file, less surrounding spaces, or typed values.

    Typed values are strings, booleans, int64, float64 or timestamps; missing ones are null. The `source` is a text, in
    which some words mean that a value is missing, another file, or a frame. `lines` are the lines of the text, or rows.
    `thousands` is the mark between groups of digits in numbers, and `order` whether the day or the month comes first in
    dates, where they were given.
    """

    path: Path
    name: str
    values: Any  # an Arrow array, maybe in chunks, or a sequence of strings to make one of
    lines: Any  # (N,) int64
    is_target: bool = False
    thousands: str = ""
    order: str = ""
    source: Literal["text", "file", "frame"] = "text"

    def __post_init__(self) -> None:
        if isinstance(self.values, (tuple, list)):
            import pyarrow as pa

            object.__setattr__(self, "values", pa.array(self.values, pa.string()))
        object.__setattr__(self, "lines", np.asarray(self.lines, dtype=np.int64))

    @classmethod
    def of_values(cls, path: Path, name: str, values: Sequence[Any], lines: Any) -> "Column | None":
        """Return a column of a frame from Python values, None where missing, without a way through Arrow's functions.

        None where they are not all strings, all booleans or all numbers that float64 holds: `frame_of` judges those.
        """
        import pyarrow as pa

        kinds = {type(value) for value in values} - {type(None)}
        if kinds <= {str}:
            words = tuple(dict.fromkeys(value for value in values if value is not None))
            slots = {None: len(words), **{word: slot for slot, word in enumerate(words)}}
            column = cls(path, name, pa.array(values, pa.string()), lines, source="frame")
            vars(column)["_encoded"] = np.array([slots[value] for value in values]), words
        elif kinds == {bool}:
            column = cls(path, name, pa.array(values, pa.bool_()), lines, source="frame")
        elif kinds <= {int, float}:
            if not all(value is None or abs(value) <= LARGEST_WHOLE for value in values):  # nan and inf are not, either
                return None
            column = cls(
                path, name, pa.array(values, pa.float64() if float in kinds else pa.int64()), lines, source="frame"
            )
            numbers = np.array(values, dtype=np.float64)  # nan for None
            vars(column)["_parsed"] = dict.fromkeys((".", ","), numbers)
        else:
            return None
        vars(column)["missing"] = np.array([value is None for value in values])
        return column

    def __len__(self) -> int:
        """Number of values N."""
        return len(self.values)

    def at(self, row: int) -> str:
        """Return the location of the value of a row for messages: `data.csv: line 3, column 'age'`."""
        return f"{self.path}: {self.place} {self.lines[row]}, column {shown(self.name)}"

    @property
    def place(self) -> str:
        """The unit that `lines` count, for messages."""
        return "line" if self.source == "text" else "row"

    def option(self, word: str) -> str:
        """Return the option that treats this column otherwise, as the command line or Python spells it."""
        return f"{word}=[{shown(self.name)}]" if self.source == "frame" else f"--{word} {shown(self.name)}"

    def rows(self, index: Any) -> "Column":
        """Return the column with these rows only."""
        index = np.asarray(index, dtype=np.int64)
        column = replace(self, values=self.values.take(index), lines=self.lines[index])
        column._parsed.update({marks: values[index] for marks, values in self._parsed.items()})
        return column

    @property
    def fields(self) -> tuple[str, ...]:
        """The values as text: fields as written, other values as Python writes them, "" where they are missing."""
        if self._is_text:
            return tuple(field or "" for field in self.values.to_pylist())
        words = (*self.words, "")
        return tuple(words[code] for code in self.codes.tolist())

    @cached_property
    def missing(self) -> Any:
        """Whether each value is missing (N,)."""
        pc = compute()
        mask = self.values.is_null().to_numpy(zero_copy_only=False)
        if self.source == "text" and self._is_text:
            mask = mask | pc.is_in(self.values, _missing_words()).to_numpy(zero_copy_only=False)
        return mask

    @cached_property
    def present(self) -> Any:
        """The Arrow array with null in place of missing values."""
        import pyarrow as pa

        pc = compute()
        if self.missing.sum() == self.values.null_count:
            return self.values
        return pc.if_else(pa.array(self.missing), pa.scalar(None, self.values.type), self.values)

    @property
    def varies(self) -> bool:
        """Whether the values, missing ones aside, differ in how they are written."""
        pc = compute()
        if self.missing.all():
            return False
        first = self.values[int(np.argmin(self.missing))]
        return bool(pc.any(pc.not_equal(self.present, first)).as_py())

    @cached_property
    def _encoded(self) -> tuple[Any, tuple[str, ...]]:
        import pyarrow as pa

        pc = compute()
        encoded = pc.dictionary_encode(self.present)
        if isinstance(encoded, pa.ChunkedArray):
            encoded = encoded.unify_dictionaries().combine_chunks()
        words = tuple(map(_text, encoded.dictionary.to_pylist()))
        return pc.fill_null(encoded.indices, len(words)).to_numpy(zero_copy_only=False), words

    @property
    def codes(self) -> Any:
        """The place of each value among the `words` (N,), their number where it is missing."""
        return self._encoded[0]

    @property
    def words(self) -> tuple[str, ...]:
        """The different values as text, in order of first appearance."""
        return self._encoded[1]

    def first(self, words: Iterable[str]) -> int | None:
        """Return the first row with one of these words."""
        wanted = set(words)
        rows = np.flatnonzero(np.array([word in wanted for word in self.words] + [False])[self.codes])
        return int(rows[0]) if len(rows) else None

    @property
    def _is_text(self) -> bool:
        return str(self.values.type) == "string"

    @property
    def is_date(self) -> bool:
        """Whether the values are typed as dates."""
        return str(self.values.type).startswith("timestamp")

    @cached_property
    def sign(self) -> str:
        """The percent or currency sign that every field has once; empty where there is none."""
        pc = compute()
        if not self._is_text or self.missing.all():
            return ""
        first = self.values[int(np.argmin(self.missing))].as_py()
        sign = next((letter for letter in first if letter in SIGNS), "")
        return sign if sign and pc.all(pc.equal(pc.count_substring(self.present, sign), 1)).as_py() else ""

    @cached_property
    def _parsed(self) -> dict[str, Any]:
        return {}

    def numbers(self, decimal: str) -> Any:
        """Return the values as float64 (N,), nan where missing; raises BadData at the first that is not a number."""
        if decimal not in self._parsed:
            values = self._plain(decimal)
            if values is None:
                known = [self._number(word, decimal) for word in self.words]
                values = np.array([*known, np.nan], dtype=np.float64)[self.codes]
            self._parsed[decimal] = values
        return self._parsed[decimal]

    def _number(self, word: str, decimal: str) -> float:
        value = number(word, decimal, self.thousands, self.sign)
        if value is None:
            reason = trouble(word, decimal, self.thousands, self.sign)
            reason = reason or "is not a number, which the other rows have there"
            row = self.first([word]) or 0
            raise BadData(f"{self.at(row)}: {shown(word)} {reason}. Correct it, or leave the field empty.")
        return value

    def is_number(self, decimal: str) -> bool:
        """Return whether every value is a number that float64 holds."""
        try:
            self.numbers(decimal)
        except BadData:
            return False
        return True

    def _plain(self, decimal: str) -> Any:
        """Return all values as float64 at once; None where some may not be plain numbers that float64 holds."""
        import pyarrow as pa

        pc = compute()
        if self.is_date:
            return None
        array = self.present
        if self._is_text:
            array = self._pointed(decimal)
            if array is None:
                return None
        try:
            floats = pc.cast(array, pa.float64(), memory_pool=pool())  # takes inf and nan, too
        except pa.ArrowInvalid:
            return None
        values = floats.to_numpy(zero_copy_only=False)
        if np.isfinite(values).sum() + self.missing.sum() < len(values):
            return None
        doubtful = (np.abs(values) >= LARGEST_WHOLE) | (values == 0)  # digits may be lost
        if self._is_text and doubtful.any():
            for word in pc.unique(array.filter(pa.array(doubtful))).to_pylist():
                if number(word) is None:
                    return None
        return values

    def _bare(self, decimals: str) -> Any:
        """Return the fields without signs, and without marks of thousands where groups and decimal mark are right."""
        pc = compute()
        array = self.present
        if self.sign:
            array = pc.replace_substring_regex(array, around(self.sign), r"\1\2\3")
        if self.thousands:
            groups = pc.match_substring_regex(array, grouped(self.thousands, decimals))
            joined = pc.replace_substring_regex(array, f"[{THOUSANDS[self.thousands]}]", "")
            array = pc.if_else(groups, joined, array)
        return array

    def _pointed(self, decimal: str) -> Any:
        """Return the fields as plain numbers are written, with a decimal point; None where some have other marks."""
        pc = compute()
        array = self._bare(decimal)
        if decimal == ",":
            if pc.any(pc.match_substring(array, ".")).as_py():
                return None
            array = pc.replace_substring(array, ",", ".")
        return pc.binary_join_element_wise(array, "e-2", "") if self.sign == "%" else array

    def truths(self, words: Sequence[str]) -> Any:
        """Return the values as 0 and 1 (N,), the first and second of `words` in any case; nan where missing."""
        truth = {words[0].casefold(): 0.0, words[1].casefold(): 1.0}
        row = self.first(word for word in self.words if word.casefold() not in truth)
        if row is not None:
            field = self.words[self.codes[row]]
            raise BadData(f"{self.at(row)}: {words[0]} or {words[1]} is wanted. Got {shown(field)}. Correct it.")
        return np.array([*(truth[word.casefold()] for word in self.words), np.nan])[self.codes]

    def times(self, order: str = "") -> Any:
        """Return the values as datetime64 in microseconds (N,), NaT where missing; raises BadData at other values.

        `order` says whether the day or the month comes first, where the values themselves do not say.
        """
        if self.is_date:
            return self.values.to_numpy(zero_copy_only=False).astype("datetime64[us]")
        known = dates.parsed(self.words, self.order or order)
        row = self.first(word for word, time in zip(self.words, known, strict=True) if np.isnat(time))
        if row is not None:
            field = self.words[self.codes[row]]
            raise BadData(f"{self.at(row)}: {shown(field)} is no date such as 2020-01-31, which the other rows have.")
        return np.append(known, np.datetime64("NaT", "us"))[self.codes]


@cache
def _missing_words() -> Any:
    import pyarrow as pa

    return pa.array(sorted(MISSING), pa.string())


def _text(value: Any) -> str:
    """Return a typed value as text: whole floats without a fraction, times in the form of ISO 8601."""
    if isinstance(value, float):
        return f"{value:.0f}" if value.is_integer() and abs(value) <= LARGEST_WHOLE else repr(value)
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


def infer_decimal(columns: Iterable[Column], separator: str, usual: str = ".") -> str:
    """Return the decimal mark of a file: a comma only where some numbers have one and none has a point.

    It is a point where commas separate the fields, and where every comma could separate thousands, unless the comma
    is `usual` for such files.
    """
    pc = compute()
    if separator == ",":
        return "."
    arrays = [column._bare(".,") for column in columns if column._is_text]
    commas = False
    for array in arrays:
        fields = array.filter(pc.match_substring(array, ","))
        fields = fields.filter(pc.match_substring_regex(fields, COMMA))
        if usual != ",":
            fields = fields.filter(pc.invert(pc.match_substring_regex(fields, GROUPED)))
        commas = commas or len(fields) > 0
    if not commas or any(pc.any(pc.match_substring_regex(array, POINT)).as_py() for array in arrays):
        return "."
    return ","


def has_leading_zeros(column: Column) -> str | None:
    """Return a field that is a whole number with leading zeros, as in codes; None if there is none."""
    pc = compute()
    if not column._is_text:
        return None
    whole = column.values.filter(pc.invert(pc.match_substring(column.values, ".")))
    whole = whole.filter(pc.starts_with(whole, "0"))
    codes = whole.filter(pc.match_substring_regex(whole, CODE))
    return codes[0].as_py() if len(codes) else None
