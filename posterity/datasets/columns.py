"""Columns of a table: their fields as written, and the kind of values these are."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from posterity.datasets.fields import (
    BOOLEANS,
    MISSING,
    decimal_comma,
    decimal_point,
    grouped,
    is_date,
    number,
    trouble,
    whole,
)
from posterity.errors import BadData, shown

Kind = Literal["number", "boolean", "category", "constant", "empty"]

MOST_CATEGORIES = 50
"""A column of text with more different values than this is no column of categories."""


@dataclass(frozen=True, eq=False)
class Column:
    """A named column: its fields as written, less surrounding spaces, and the line of each in the file."""

    path: Path
    name: str
    fields: tuple[str, ...]
    lines: tuple[int, ...]
    is_target: bool = False

    def at(self, row: int) -> str:
        """Where the field of a row is, as messages say it: `data.csv: line 3, column 'age'`."""
        return f"{self.path}: line {self.lines[row]}, column {shown(self.name)}"

    def rows(self, index: Sequence[int]) -> "Column":
        """The column with these rows only."""
        fields, lines = tuple(self.fields[row] for row in index), tuple(self.lines[row] for row in index)
        return replace(self, fields=fields, lines=lines)

    @property
    def missing(self) -> int:
        """How many fields stand for no value."""
        return sum(field in MISSING for field in self.fields)

    def numbers(self, decimal: str) -> list[float | None]:
        """The fields as numbers, None where one is missing; BadData at the first that is not a number."""
        values: list[float | None] = []
        for row, field in enumerate(self.fields):
            value = None if field in MISSING else number(field, decimal)
            if value is None and field not in MISSING:
                reason = trouble(field, decimal) or "is not a number, which the other rows have there"
                raise BadData(f"{self.at(row)}: {shown(field)} {reason}. Correct it, or leave the field empty.")
            values.append(value)
        return values

    def truths(self, words: Sequence[str]) -> list[float | None]:
        """The fields as 0 and 1, the first and second of `words`; None where one is missing."""
        values: list[float | None] = []
        for row, field in enumerate(self.fields):
            word = field.casefold()
            if field not in MISSING and word not in words:
                raise BadData(f"{self.at(row)}: {words[0]} or {words[1]} is wanted. Got {shown(field)}. Correct it.")
            values.append(None if field in MISSING else float(word == words[1]))
        return values


def infer_decimal(columns: Iterable[Column], separator: str, usual: str = ".") -> str:
    """The decimal mark of a file: a comma only where some numbers have one and none has a point.

    Not where commas separate the fields, nor where every comma could separate thousands, unless the comma is
    `usual` for such files.
    """
    if separator == ",":
        return "."
    certain = usual == ","
    found = False
    for column in columns:
        for field in column.fields:
            if decimal_point(field):
                return "."
            if decimal_comma(field):
                found = True
                certain = certain or not grouped(field)
    return "," if found and certain else "."


def infer_kind(column: Column, decimal: str, as_category: bool = False) -> Kind:
    """The kind of a column; BadData, with the way out, for text, dates, and numbers that cannot be taken.

    - `empty`: no values. `constant`: the same one everywhere.
    - `number`: plain numbers only (a single one beside missing ones is a `category`: there or not).
    - `boolean`: both words of one pair of `BOOLEANS` and no other, in any case.
    - `category`: text, at most `MOST_CATEGORIES` different, one of them repeated; or asked for by `as_category`.
    """
    present = [field for field in column.fields if field not in MISSING]
    distinct = set(present)
    if not distinct:
        return "empty"
    if len(distinct) == 1 and len(present) == len(column.fields):
        return "constant"
    if as_category:
        _check_categories(column, present, distinct)
        return "category"
    numeric = {field for field in distinct if number(field, decimal) is not None}
    if len(numeric) == len(distinct):
        return "number" if len(distinct) > 1 else "category"
    if any({word.casefold() for word in distinct} == set(pair) for pair in BOOLEANS):
        return "boolean"
    _refuse_numbers_in_disguise(column, decimal, numeric)
    _refuse_mixture(column, numeric)
    _check_categories(column, present, distinct)
    return "category"


def boolean_words(column: Column) -> tuple[str, str]:
    """The pair of words that a boolean column uses."""
    words = {field.casefold() for field in column.fields if field not in MISSING}
    return next(pair for pair in BOOLEANS if words <= set(pair))


def has_leading_zeros(column: Column) -> str | None:
    """A field that is a whole number with zeros in front, as codes have them."""
    return next((field for field in column.fields if whole(field) and len(field) > 1 and field[0] == "0"), None)


def _refuse_numbers_in_disguise(column: Column, decimal: str, numeric: set[str]) -> None:
    for row, field in enumerate(column.fields):
        if field in MISSING or field in numeric:
            continue
        reason = trouble(field, decimal)
        if reason:
            raise BadData(f"{column.at(row)}: {shown(field)} {reason}. {_remedy(reason, column)}")
        if is_date(field):
            raise BadData(
                f"{column.at(row)}: {shown(field)} is a date or time, which cannot be used. Turn it into numbers, "
                f"or {_way_out(column)}."
            )


def _refuse_mixture(column: Column, numeric: set[str]) -> None:
    if not numeric:
        return
    rows = [row for row, field in enumerate(column.fields) if field not in MISSING]
    a_number = next(row for row in rows if column.fields[row] in numeric)
    a_text = next(row for row in rows if column.fields[row] not in numeric)
    raise BadData(
        f"{column.at(a_text)}: {shown(column.fields[a_text])} is text, where line {column.lines[a_number]} has the "
        f"number {shown(column.fields[a_number])}. Correct it, take the column as categories "
        f"(--category {shown(column.name)}), or {_way_out(column)}."
    )


def _check_categories(column: Column, present: list[str], distinct: set[str]) -> None:
    if len(distinct) > MOST_CATEGORIES or len(distinct) == len(present):
        repeated = "" if len(distinct) > MOST_CATEGORIES else ", none repeated"
        raise BadData(
            f"{column.path}: column {shown(column.name)} is text: {len(distinct)} different values in {len(present)} "
            f"fields{repeated}. A column of categories has at most {MOST_CATEGORIES}, and some repeated. "
            f"You may {_way_out(column)}."
        )


def _remedy(reason: str, column: Column) -> str:
    if "nothing says which" in reason:
        return "Say the decimal mark (--decimal), or write numbers without separators."
    if "lose digits" in reason:
        return f"Take the column as categories (--category {shown(column.name)}), or {_way_out(column)}."
    return f"Correct it, or {_way_out(column)}."


def _way_out(column: Column) -> str:
    return "name another target" if column.is_target else f"leave the column out (--drop {shown(column.name)})"
