"""What one field of a table says: a number, nothing, a truth value, a date, or a number that cannot be taken."""

import math
import re

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
