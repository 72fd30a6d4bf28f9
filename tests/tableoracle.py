"""A second reading of table files, written apart from the library's: slow, letter by letter, and strict."""

import datetime
import math
import re
from fractions import Fraction

SPACES = " \t\u00a0"
MISSING = ("", "NA", "N/A", "n/a", "NaN", "nan", "null", "NULL", "None", "?")
PLAIN = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?", re.ASCII)


class UnsoundError(Exception):
    """The text is not a table under this separator."""


def decode(data: bytes) -> str:
    for mark, name in (
        (b"\xff\xfe\x00\x00", "utf-32-le"),
        (b"\x00\x00\xfe\xff", "utf-32-be"),
        (b"\xff\xfe", "utf-16-le"),
        (b"\xfe\xff", "utf-16-be"),
        (b"\xef\xbb\xbf", "utf-8"),
    ):
        if data.startswith(mark):
            return data[len(mark) :].decode(name)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "".join(map(chr, data))


def parse(text: str, separator: str) -> list[list[str]]:
    """The records of a text, blank ones left out; UnsoundError where quotes do not work out or counts differ."""
    rows = _spaced(text) if separator == " " else _separated(text, separator)
    rows = [[field.strip(SPACES) for field in row] for row in rows]
    rows = [row for row in rows if len(row) > 1 or row[0]]
    if not rows or len(rows[0]) < 2 or any(len(row) != len(rows[0]) for row in rows):
        raise UnsoundError
    return rows


def separators(text: str) -> list[str]:
    """The separators under which a text is a table."""
    present = [sign for sign in ",;\t|" if sign in text] or [" "]
    found = []
    for sign in present:
        try:
            parse(text, sign)
        except UnsoundError:
            continue
        found.append(sign)
    return found


def _separated(text: str, separator: str) -> list[list[str]]:
    rows, row, field, state = [], [], "", "start"
    text = text.replace("\r\n", "\n") if '"' not in text else text
    position = 0
    while position < len(text):
        letter = text[position]
        position += 1
        if state == "quoted":
            if letter != '"':
                field += letter
            elif text[position : position + 1] == '"':
                field += '"'
                position += 1
            else:
                state = "closed"
        elif letter in "\r\n":
            if letter == "\r" and text[position : position + 1] == "\n":
                position += 1
            rows.append([*row, field])
            row, field, state = [], "", "start"
        elif letter == separator:
            row.append(field)
            field, state = "", "start"
        elif state == "closed":
            raise UnsoundError
        elif state == "start" and letter == " ":
            continue
        elif state == "start" and letter == '"':
            state = "quoted"
        else:
            field += letter
            state = "plain"
    if state == "quoted":
        raise UnsoundError
    return [*rows, [*row, field]]


def _spaced(text: str) -> list[list[str]]:
    rows = []
    for line in text.replace("\r\n", "\n").replace("\r", "\n").split("\n"):
        row, rest = [], line.strip(" \t")
        while rest:
            if rest[0] == '"':
                end = 1
                while end < len(rest) and (rest[end] != '"' or rest[end : end + 2] == '""'):
                    end += 2 if rest[end] == '"' else 1
                if end >= len(rest) or (rest[end + 1 :] and rest[end + 1] not in " \t"):
                    raise UnsoundError
                row.append(rest[1:end].replace('""', '"'))
                rest = rest[end + 1 :].lstrip(" \t")
            else:
                word = re.match(r"[^ \t]+", rest)[0]
                row.append(word)
                rest = rest[len(word) :].lstrip(" \t")
        rows.append(row or [""])
    return rows


def check_number(field: str, decimal: str, value: float) -> None:
    """That `value` is the float64 nearest to what `field` says, with no digit of a whole number lost."""
    text = field if decimal == "." else field.replace(",", ".")
    assert decimal == "." or "." not in field
    assert PLAIN.fullmatch(text), field
    exact = Fraction(text)
    assert math.isfinite(value)
    assert abs(exact - Fraction(value)) <= Fraction(math.ulp(value)) / 2
    assert (exact == 0) == (value == 0)
    assert not re.fullmatch(r"[-+]?\d+", text) or exact == Fraction(value)


def amount(field: str, decimal: str, sign: str) -> float:
    """The number of a field: the nearest float64, without its sign of currency, or a hundredth for a percent sign."""
    assert field.count(sign) == 1 or not sign
    text = field.replace(sign, "").strip(SPACES) if sign else field
    if sign == "%":
        assert PLAIN.fullmatch(text)
        return float(Fraction(text) / 100)
    value = float(text.replace(decimal, "."))
    check_number(text, decimal, value)
    return value


def date_part(field: str, part: str) -> str:
    """What a part of a date such as 2021-01-31 is, as text; empty for a missing date."""
    if field in MISSING:
        return ""
    assert re.fullmatch(r"\d{4}([-/.])\d{1,2}\1\d{1,2}", field), field
    date = datetime.date(*map(int, re.split("[-/.]", field)))
    parts = {
        "year": str(date.year),
        "month": date.strftime("%b"),
        "weekday": date.strftime("%a"),
        "days": str(date.toordinal() - datetime.date(1970, 1, 1).toordinal()),
    }
    return parts[part]


def is_numeric(field: str) -> bool:
    """Whether Python itself would take the field as a number."""
    try:
        float(field)
    except ValueError:
        return False
    return True
