"""Dates in text: which are read, in which order of day and month, and the parts that become inputs."""

import re
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import numpy as np

ORDERS = ("day-first", "month-first")
"""Whether 1/2/2020 is a day in February or in January."""

PARTS = ("year", "month", "weekday", "hour", "days")
"""What becomes of a date: its year, month, day of the week and hour, and the days that have elapsed."""

MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
WEEKDAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")

_MONTH = rf"(?:{'|'.join(MONTHS)})[a-z]*\.?"
_ANY = re.compile(
    r"[0-9]{4}[-/.][0-9]{1,2}[-/.][0-9]{1,2}(?:[T ].*)?"
    r"|[0-9]{4}-(?:0[1-9]|1[0-2])"
    r"|[0-9]{1,2}[-/.][0-9]{1,2}[-/.](?:[0-9]{4}|[0-9]{2})(?: .*)?"
    r"|[0-9]{1,2}:[0-9]{2}(?::[0-9]{2}(?:\.[0-9]+)?)?(?: ?[ap]m)?"
    rf"|[0-9]{{1,2}}\.?[ -]{_MONTH}[ -][0-9]{{2,4}}(?: .*)?"
    rf"|{_MONTH} [0-9]{{1,2}},? [0-9]{{4}}(?: .*)?",
    re.IGNORECASE,
)
_TIME = (
    r"(?:(?:T| +)(?P<hour>[0-9]{1,2}):(?P<minute>[0-9]{2})(?::(?P<second>[0-9]{2})(?:[.,](?P<fraction>[0-9]{1,9}))?)?"
    r"(?: ?(?P<half>[ap]m))?(?: ?(?:Z|UTC|[+-][0-9]{2}:?[0-9]{2}))?)?"
)
_READ = tuple(
    re.compile(form + _TIME, re.IGNORECASE)
    for form in (
        r"(?P<year>[0-9]{4})(?P<mark>[-/.])(?P<month>[0-9]{1,2})(?P=mark)(?P<day>[0-9]{1,2})",
        r"(?P<day>[0-9]{1,2})\.(?P<month>[0-9]{1,2})\.(?P<year>[0-9]{4})",
        r"(?P<first>[0-9]{1,2})(?P<mark>[-/])(?P<second_part>[0-9]{1,2})(?P=mark)(?P<year>[0-9]{4})",
        r"(?P<day>[0-9]{1,2})\.?[ -](?P<name>[a-z]{3,9})\.?[ -](?P<year>[0-9]{4})",
        r"(?P<name>[a-z]{3,9})\.? (?P<day>[0-9]{1,2}),? (?P<year>[0-9]{4})",
    )
)
_FULL = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)
_NAMES = {name.lower(): place for names in (MONTHS, _FULL) for place, name in enumerate(names, start=1)}


def looks_like(field: str) -> bool:
    """Return whether a field is written like a date or time, readable or not."""
    return _ANY.fullmatch(field) is not None


def is_readable(words: Sequence[str], order: str = "") -> bool:
    """Return whether all of these fields are dates, in an order of day and month that is clear."""
    return bool(words) and looks_like(words[0]) and not np.isnat(parsed(words, order)).any()


def parsed(words: Sequence[str], order: str = "") -> Any:
    """Return fields as datetime64 in microseconds, NaT for what is no date or not clear.

    Read are 2020-01-31 (also with / or .), 31.1.2020, 31/1/2020 and 1/31/2020 (also with -), 31 Jan 2020 and
    January 31, 2020, each with or without a time; an offset from UTC is not used: the clock counts as written. Of
    31/1/2020 the order is `order`, or what all such fields allow, if that is one order only.

    >>> parsed(["1/2/2020", "13/2/2020"]).astype("datetime64[D]").tolist()[0]
    datetime.date(2020, 2, 1)
    >>> is_readable(["1/2/2020", "3/2/2020"]), is_readable(["1/2/2020", "3/2/2020"], "month-first")
    (False, True)
    """
    import pyarrow as pa

    try:
        return pa.array(words, pa.string()).cast(pa.timestamp("us")).to_numpy()
    except pa.ArrowInvalid:  # not all of them are in the form of ISO 8601
        order = order or find_order(words)
        return np.array([_read(word, order) for word in words], dtype="datetime64[us]")


def _matched(word: str) -> dict[str, str]:
    result = next((match for pattern in _READ if (match := pattern.fullmatch(word))), None)
    return {} if result is None else {name: value for name, value in result.groupdict().items() if value}


def find_order(words: Sequence[str]) -> str:
    """Return the only order of day and month that all fields such as 31/1/2020 allow; "" if there are two or none."""
    others = (word for word in words if not word[:4].isdigit())  # begin with a year
    pairs = [(int(found["first"]), int(found["second_part"])) for found in map(_matched, others) if "first" in found]
    fits = [all(max(pair) <= 31 and pair[place] <= 12 for pair in pairs) for place in (1, 0)]
    return ORDERS[fits.index(True)] if sum(fits) == 1 else ""


def _read(word: str, order: str) -> datetime | None:
    found = _matched(word)
    if "first" in found:
        if not order:
            return None
        found["day"], found["month"] = found["first"], found["second_part"]
        if order == "month-first":
            found["month"], found["day"] = found["day"], found["month"]
    month = _NAMES.get(found["name"].lower(), 0) if "name" in found else int(found.get("month", 0))
    hour = int(found.get("hour", 0))
    if "half" in found:
        hour = hour % 12 + 12 * (found["half"].lower() == "pm") if 1 <= hour <= 12 else 24
    fraction = int(found.get("fraction", "0").ljust(6, "0")[:6])
    try:
        return datetime(
            int(found["year"]), month, int(found["day"]), hour, int(found.get("minute", 0)),
            int(found.get("second", 0)), fraction,
        )  # fmt: skip
    except (KeyError, ValueError):
        return None


def remedy(words: Sequence[str]) -> str:
    """Return what to do about dates of inputs that are not readable."""
    if any(is_readable(words, order) for order in ORDERS):
        return "Day and month may be either way round: say which (--dates day-first or month-first)"
    return "Write all rows as 2020-01-31, turn it into numbers"


def part(times: Any, name: str) -> Any:
    """Return a part of times as numbers, nan where there is none; of months and weekdays the place in the list."""
    days = times.astype("datetime64[D]")
    values = {
        "year": lambda: times.astype("datetime64[Y]").astype(np.int64) + 1970,
        "month": lambda: times.astype("datetime64[M]").astype(np.int64) % 12,
        "weekday": lambda: (days.astype(np.int64) + 3) % 7,
        "hour": lambda: (times - days).astype(np.int64) / 3.6e9,
        "days": lambda: times.astype(np.int64) / 8.64e10,
    }[name]()
    return np.where(np.isnat(times), np.nan, values.astype(np.float64))
