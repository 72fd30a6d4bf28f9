"""Columns of text: what kind they are, and their labels."""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from posterity.errors import BadData, shown

MISSING = frozenset({"", "NA", "N/A", "n/a", "NaN", "nan", "null", "NULL", "None", "?"})
"""The fields that stand for no value, exactly as written here: `none` and `na` are values."""

BOOLEANS = (("false", "true"), ("no", "yes"), ("f", "t"))
"""The pairs of words, without regard to case, that make a column boolean: first 0, second 1."""

LARGEST_WHOLE = 2**53  # whole numbers above lose digits as float64

_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_WHOLE = re.compile(r"[+-]?[0-9]+")
_COMMA = re.compile(r"[+-]?(?:[0-9]+,[0-9]*|,[0-9]+)(?:[eE][+-]?[0-9]+)?")
_GROUPED = re.compile(
    r"[+-]?[1-9][0-9]{0,2}(?:(?:,[0-9]{3})+|(?:\.[0-9]{3})+|(?:[ _'\u2019\u00a0\u202f][0-9]{3})+)(?:[.,][0-9]+)?"
)
_HEXADECIMAL = re.compile(r"[+-]?0[xX][0-9a-fA-F]+")
_UNIT = re.compile(r"[+-]?[$€£¥] ?[0-9][0-9.,]*|[+-]?[0-9.,]*[0-9] ?[%$€£¥]")
_FORTRAN = re.compile(r"[+-]?(?:[0-9]+\.[0-9]*|\.[0-9]+)[dD][+-]?[0-9]+")
_MINUS = re.compile(r"[\u2010-\u2013\u2212][0-9.,]*[0-9]")
_ERROR = re.compile(r"#(?:N/A|DIV/0!|VALUE!|REF!|NUM!|NAME\?|NULL!|####*)")
_MONTH = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*\.?"
_DATE = re.compile(
    r"[0-9]{4}[-/.][0-9]{1,2}[-/.][0-9]{1,2}(?:[T ].*)?"
    r"|[0-9]{4}-(?:0[1-9]|1[0-2])"
    r"|[0-9]{1,2}[-/.][0-9]{1,2}[-/.](?:[0-9]{4}|[0-9]{2})(?: .*)?"
    r"|[0-9]{1,2}:[0-9]{2}(?::[0-9]{2}(?:\.[0-9]+)?)?(?: ?[ap]m)?"
    rf"|[0-9]{{1,2}}\.?[ -]{_MONTH}[ -][0-9]{{2,4}}(?: .*)?"
    rf"|{_MONTH} [0-9]{{1,2}},? [0-9]{{4}}(?: .*)?",
    re.IGNORECASE,
)


def number(field: str, decimal: str = ".") -> float | None:
    """The number that a field writes with the given decimal mark; None where `trouble` or no number is there.

    >>> number("-1.5e3"), number("2,5", decimal=","), number("2,5"), number("1e400"), number("inf")
    (-1500.0, 2.5, None, None, None)
    """
    text = _pointed(field, decimal)
    if not _NUMBER.fullmatch(text):
        return None
    value = float(text)
    return None if _loss(text, value) else value


def trouble(field: str, decimal: str = ".") -> str | None:
    """Why a field that looks like a number cannot be taken as one; None for plain numbers and for other text.

    >>> trouble("1e400")
    'is too large: numbers end at 1.8e308'
    >>> trouble("0x1F"), trouble("12"), trouble("red")
    ('is hexadecimal', None, None)
    """
    text = _pointed(field, decimal)
    if _NUMBER.fullmatch(text):
        return _loss(text, float(text))
    if _GROUPED.fullmatch(field):
        if _COMMA.fullmatch(field):
            return "has a thousands separator or a decimal comma, and nothing says which"
        return "has a thousands separator"
    if _COMMA.fullmatch(field):
        return "has a decimal comma where a decimal point is expected"
    if _NUMBER.fullmatch(field):
        return "has a decimal point where a decimal comma is expected"
    for pattern, reason in _FORMS:
        if pattern.fullmatch(field):
            return reason
    try:
        value = float(field)  # takes more than is taken here: inf, 1_0, digits of other scripts
    except ValueError:
        return None
    return "is infinite" if math.isinf(value) else "is not written as a plain number, such as -1234.5 or 1.2e-3"


def looks_numeric(field: str) -> bool:
    """Whether a field is a number with either decimal mark, or one that cannot be taken."""
    return number(field) is not None or trouble(field) is not None


def decimal_comma(field: str) -> bool:
    """Whether a field is a number with a comma in it: a decimal mark, if not a thousands separator."""
    return _COMMA.fullmatch(field) is not None


def decimal_point(field: str) -> bool:
    """Whether a field is a number with a point in it."""
    return "." in field and _NUMBER.fullmatch(field) is not None


def grouped(field: str) -> bool:
    """Whether the digits of a field stand in groups of three, as thousands do."""
    return _GROUPED.fullmatch(field) is not None


def whole(field: str) -> bool:
    """Whether a field is a number written without fraction and exponent."""
    return _WHOLE.fullmatch(field) is not None


def is_date(field: str) -> bool:
    """Whether a field is a date or a time of day, in one of the usual ways to write them."""
    return _DATE.fullmatch(field) is not None


def _pointed(field: str, decimal: str) -> str:
    if decimal == ".":
        return field
    return field.replace(",", ".") if "." not in field else f"not {field}"


def _loss(text: str, value: float) -> str | None:
    """What a number would lose as a float64."""
    if math.isinf(value):
        return "is too large: numbers end at 1.8e308"
    if value == 0 and re.search("[1-9]", re.split("[eE]", text)[0]):
        return "is too small: numbers but zero begin at 5e-324"
    if abs(value) >= LARGEST_WHOLE and _WHOLE.fullmatch(text) and abs(int(text)) > LARGEST_WHOLE:
        return f"would lose digits: whole numbers are exact up to {LARGEST_WHOLE} only"
    return None


_FORMS = (
    (_HEXADECIMAL, "is hexadecimal"),
    (_UNIT, "has a percent or currency sign"),
    (_FORTRAN, "has the exponent letter D: write E"),
    (_MINUS, "has a typographic minus sign: write -"),
    (_ERROR, "is the error of a spreadsheet"),
)


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


def class_labels(column: Column, kind: Kind, decimal: str) -> list[str | None]:
    """The name of the class of each row of a target, one for all ways to write it; None where it is missing.

    `1`, `1.0` and `01` are one class, and so are `yes` and `Yes` where the target is boolean.
    """
    if kind == "number":
        return [None if value is None else _number_name(value) for value in column.numbers(decimal)]
    fields = [None if field in MISSING else field for field in column.fields]
    return [field and field.casefold() for field in fields] if kind == "boolean" else fields


def class_names(labels: Iterable[str | None], kind: Kind) -> tuple[str, ...]:
    """The different labels in order: numbers by size, truth values false first, text by its letters."""
    present = {label for label in labels if label is not None}
    return tuple(sorted(present, key=float)) if kind == "number" else tuple(sorted(present))


def _number_name(value: float) -> str:
    return str(int(value)) if value.is_integer() and abs(value) < LARGEST_WHOLE else repr(value)
