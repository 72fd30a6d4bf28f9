"""Fields of text files: which are missing, which are numbers, and why others are not."""

import math
import re
from functools import cache

MISSING = frozenset({"", "NA", "N/A", "n/a", "NaN", "nan", "null", "NULL", "None", "?"})
"""Fields that mark a missing value, exactly as written here: `none` and `na` are values."""

BOOLEANS = (("false", "true"), ("no", "yes"), ("f", "t"))
"""Pairs of words (0, 1), in any case, that make a column boolean."""

SIGNS = "%$€£¥"
"""The percent sign, which divides by 100, and signs of currencies, which do not count: one for a whole column."""

THOUSANDS = {",": ",", ".": r"\.", " ": " \u00a0\u202f", "'": "'\u2019", "_": "_"}
"""Marks between groups of three digits, and how each may be written, as a class of a regular expression."""

LARGEST_WHOLE = 2**53  # larger whole numbers lose digits as float64
_LONGEST = 1000  # letters of a field that may be a number in another notation

# Each pattern can split a field in one way only, so that matching takes time in proportion to the field's length.
_NUMBER = re.compile(r"[+-]?(?:[0-9]++(?:\.[0-9]*+)?|\.[0-9]++)(?:[eE][+-]?[0-9]++)?")
_WHOLE = re.compile(r"[+-]?[0-9]++")
_COMMA = re.compile(r"[+-]?(?:[0-9]+,[0-9]*|,[0-9]+)(?:[eE][+-]?[0-9]+)?")
_GROUPED = re.compile(
    r"[+-]?[1-9][0-9]{0,2}(?:(?:,[0-9]{3})+|(?:\.[0-9]{3})+|(?:["
    " _'\u2019\u00a0\u202f"  # not raw: Arrow's expressions have no such escapes
    r"][0-9]{3})+)(?:[.,][0-9]+)?"
)
_HEXADECIMAL = re.compile(r"[+-]?0[xX][0-9a-fA-F]+")
_SPACE = "[ \u00a0\u202f]?"
_SIGNED = re.compile(rf"[+-]?[$€£¥]{_SPACE}[0-9][0-9.,]*|[+-]?[0-9.,]*[0-9]{_SPACE}[%$€£¥]")
_FORTRAN = re.compile(r"[+-]?(?:[0-9]+\.[0-9]*|\.[0-9]+)[dD][+-]?[0-9]+")
_MINUS = re.compile(r"[\u2010-\u2013\u2212][0-9.,]*[0-9]")
_ERROR = re.compile(r"#(?:N/A|DIV/0!|VALUE!|REF!|NUM!|NAME\?|NULL!|####*)")
POINT, COMMA, GROUPED, CODE = (
    f"^(?:{pattern})$"
    for pattern in (
        r"[+-]?(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
        _COMMA.pattern,
        _GROUPED.pattern,
        "0[0-9]+",
    )
)
"""Patterns of whole fields for Arrow: numbers with a point, a comma, groups of digits, zeros in front."""

_FORMS = (
    (_HEXADECIMAL, "is hexadecimal"),
    (_SIGNED, "has a percent or currency sign, and not every row has this one"),
    (_FORTRAN, "has the exponent letter D: write E"),
    (_MINUS, "has a typographic minus sign: write -"),
    (_ERROR, "is the error of a spreadsheet"),
)


def grouped(thousands: str, decimal: str) -> str:
    """Return the pattern of a whole field whose digits are in groups of three with this mark between them."""
    return rf"^[+-]?[0-9]{{1,3}}(?:[{THOUSANDS[thousands]}][0-9]{{3}})+(?:[{decimal}][0-9]*)?$"


def around(sign: str) -> str:
    """Return the pattern of a sign before or after a number; its three groups are what is left beside it."""
    return rf"^([+-]?)[{sign}]{_SPACE}([0-9.,])|([0-9.,]){_SPACE}[{sign}]$"


def number(field: str, decimal: str = ".", thousands: str = "", sign: str = "") -> float | None:
    """Return the number in a field with the given marks; None for text and for a number with `trouble`.

    >>> number("-1.5e3"), number("2,5", decimal=","), number("2,5"), number("1e400"), number("inf")
    (-1500.0, 2.5, None, None, None)
    >>> number("1,234.5", thousands=","), number("12 %", sign="%"), number("-$3.50", sign="$")
    (1234.5, 0.12, -3.5)
    """
    text = _pointed(_unsigned(field, sign), decimal, thousands)
    text += "e-2" * (sign == "%")
    if not _NUMBER.fullmatch(text) or (sign and sign not in field):
        return None
    value = float(text)
    return None if _loss(text, value) else value


def trouble(field: str, decimal: str = ".", thousands: str = "", sign: str = "") -> str | None:
    """Return why a field that looks like a number cannot be read as one; None for plain numbers and other text.

    >>> trouble("1e400")
    'is too large: numbers end at 1.8e308'
    >>> trouble("0x1F"), trouble("12"), trouble("red")
    ('is hexadecimal', None, None)
    """
    field = _unsigned(field, sign)
    text = _pointed(field, decimal, thousands)
    if _NUMBER.fullmatch(text):
        return _loss(text, float(text))
    if len(field) > _LONGEST:
        return None
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


def _unsigned(field: str, sign: str) -> str:
    return re.sub(around(sign), r"\1\2\3", field) if sign and field.count(sign) == 1 else field


def _pointed(field: str, decimal: str, thousands: str) -> str:
    """Return the field with a decimal point and without marks between groups, or what is no number."""
    if thousands and _groups(thousands, decimal).fullmatch(field):
        field = re.sub(f"[{THOUSANDS[thousands]}]", "", field)
    if decimal == ".":
        return field
    return field.replace(",", ".") if "." not in field else f"not {field}"


@cache
def _groups(thousands: str, decimal: str) -> re.Pattern[str]:
    return re.compile(grouped(thousands, decimal))


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
