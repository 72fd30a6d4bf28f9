"""Columns of strings: their kind, their values, and the labels of a target."""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from posterity.errors import BadData, shown

MISSING = frozenset({"", "NA", "N/A", "n/a", "NaN", "nan", "null", "NULL", "None", "?"})
"""Fields that mark a missing value, exactly as written here: `none` and `na` are values."""

BOOLEANS = (("false", "true"), ("no", "yes"), ("f", "t"))
"""Pairs of words (0, 1), in any case, that make a column boolean."""

LARGEST_WHOLE = 2**53  # larger whole numbers lose digits as float64

# Each pattern can split a field in one way only, so that matching takes time in proportion to the field's length.
_NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
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
    """Return the number in a field with the given decimal mark; None for text and for a number with `trouble`.

    >>> number("-1.5e3"), number("2,5", decimal=","), number("2,5"), number("1e400"), number("inf")
    (-1500.0, 2.5, None, None, None)
    """
    text = _pointed(field, decimal)
    if not _NUMBER.fullmatch(text):
        return None
    value = float(text)
    return None if _loss(text, value) else value


def trouble(field: str, decimal: str = ".") -> str | None:
    """Return why a field that looks like a number cannot be read as one; None for plain numbers and other text.

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
        value = float(field)  # accepts more than this reader: inf, 1_0, digits of other scripts
    except ValueError:
        return None
    return "is infinite" if math.isinf(value) else "is not written as a plain number, such as -1234.5 or 1.2e-3"


def looks_numeric(field: str) -> bool:
    """Return whether a field is a number with either decimal mark, or one with `trouble`."""
    return number(field) is not None or trouble(field) is not None


def _pointed(field: str, decimal: str) -> str:
    if decimal == ".":
        return field
    return field.replace(",", ".") if "." not in field else f"not {field}"


def _loss(text: str, value: float) -> str | None:
    """Return why float64 cannot hold a number; None where it can."""
    if math.isinf(value):
        return "is too large: numbers end at 1.8e308"
    if value == 0 and re.search("[1-9]", re.split("[eE]", text)[0]):
        return "is too small: numbers but zero begin at 5e-324"
    digits = text.lstrip("+-0")  # Python refuses to read more than 4300 digits, be they zeros
    if abs(value) >= LARGEST_WHOLE and _WHOLE.fullmatch(text) and int(digits) > LARGEST_WHOLE:
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
"""Largest number of distinct values in a column of categories."""


@dataclass(frozen=True, eq=False)
class Column:
    """A named column: its fields as written, less surrounding spaces, and the line of each in the file."""

    path: Path
    name: str
    fields: tuple[str, ...]
    lines: tuple[int, ...]
    is_target: bool = False

    def at(self, row: int) -> str:
        """Return the location of the field of a row for messages: `data.csv: line 3, column 'age'`."""
        return f"{self.path}: line {self.lines[row]}, column {shown(self.name)}"

    def rows(self, index: Sequence[int]) -> "Column":
        """Return the column with these rows only."""
        fields, lines = tuple(self.fields[row] for row in index), tuple(self.lines[row] for row in index)
        return replace(self, fields=fields, lines=lines)

    @property
    def missing(self) -> int:
        """Number of missing values."""
        return sum(field in MISSING for field in self.fields)

    def numbers(self, decimal: str) -> list[float | None]:
        """Return the fields as numbers, None where missing; raises BadData at the first that is not a number."""
        values = [None if field in MISSING else number(field, decimal) for field in self.fields]
        for row, (field, value) in enumerate(zip(self.fields, values, strict=True)):
            if value is None and field not in MISSING:
                reason = trouble(field, decimal) or "is not a number, which the other rows have there"
                raise BadData(f"{self.at(row)}: {shown(field)} {reason}. Correct it, or leave the field empty.")
        return values

    def truths(self, words: Sequence[str]) -> list[float | None]:
        """Return the fields as 0 and 1, the first and second of `words` in any case; None where missing."""
        truth = {words[0].casefold(): 0.0, words[1].casefold(): 1.0}
        for row, field in enumerate(self.fields):
            if field not in MISSING and field.casefold() not in truth:
                raise BadData(f"{self.at(row)}: {words[0]} or {words[1]} is wanted. Got {shown(field)}. Correct it.")
        return [None if field in MISSING else truth[field.casefold()] for field in self.fields]


def infer_decimal(columns: Iterable[Column], separator: str, usual: str = ".") -> str:
    """Return the decimal mark of a file: a comma only where some numbers have one and none has a point.

    It is a point where commas separate the fields, and where every comma could separate thousands, unless the comma
    is `usual` for such files.
    """
    if separator == ",":
        return "."
    commas = False
    for column in columns:
        for field in column.fields:
            if "." in field and _NUMBER.fullmatch(field):
                return "."
            commas = commas or (_COMMA.fullmatch(field) is not None and (usual == "," or not _GROUPED.fullmatch(field)))
    return "," if commas else "."


def infer_kind(column: Column, decimal: str, as_category: bool = False) -> Kind:
    """Return the kind of a column; raises BadData, with a remedy, for text, dates, and numbers with `trouble`.

    - `empty`: no values. `constant`: the same value in every row.
    - `number`: plain numbers only (a single distinct one beside missing values is a `category`: present or not).
    - `boolean`: both words of one pair of `BOOLEANS` and no other, in any case.
    - `category`: text with at most `MOST_CATEGORIES` distinct values, some repeated; or by `as_category`.
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
    """Return the two words of a boolean column as they are first written there, the word of 0 first."""
    written: dict[str, str] = {}
    for field in column.fields:
        if field not in MISSING:
            written.setdefault(field.casefold(), field)
    zero, one = next(pair for pair in BOOLEANS if written.keys() <= set(pair))
    return written.get(zero, zero), written.get(one, one)


def has_leading_zeros(column: Column) -> str | None:
    """Return a field that is a whole number with leading zeros, as in codes; None if there is none."""
    return next((f for f in column.fields if _WHOLE.fullmatch(f) and len(f) > 1 and f[0] == "0"), None)


def _refuse_numbers_in_disguise(column: Column, decimal: str, numeric: set[str]) -> None:
    for row, field in enumerate(column.fields):
        if field in MISSING or field in numeric:
            continue
        reason = trouble(field, decimal)
        if reason:
            raise BadData(f"{column.at(row)}: {shown(field)} {reason}. {_remedy(reason, column)}")
        if _DATE.fullmatch(field):
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


def class_names(column: Column, kind: Kind, decimal: str) -> tuple[str, ...]:
    """Return the labels of a target as written: numbers by size, booleans false first, text alphabetically.

    Every spelling is a class of its own: `1`, `1.0` and `01` are three, and so are `yes`, `Yes` and `YES`.
    """
    labels = set(column.fields) - MISSING
    return tuple(
        sorted(labels, key=(lambda label: (_meaning(label, kind, decimal), label)) if kind != "category" else str)
    )


def classes_by_meaning(classes: Sequence[str], kind: Kind, decimal: str | None = None) -> dict[str | float, list[str]]:
    """Return the labels that mean the same by what they mean: their number, or the word without regard to case.

    Without a decimal mark, which labels of an earlier file do not tell, a label is read with either.
    """
    alike: dict[str | float, list[str]] = {}
    for label in classes:
        alike.setdefault(_meaning(label, kind, decimal), []).append(label)
    return alike


def _meaning(label: str, kind: Kind, decimal: str | None) -> str | float:
    if kind != "number":
        return label.casefold()
    values = [number(label, mark) for mark in ((decimal,) if decimal else (".", ","))]
    return next((value for value in values if value is not None), label)
