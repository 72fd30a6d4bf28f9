"""Which line names the columns of a table, and their names."""

import re
from collections.abc import Sequence

from posterity.datasets.fields import MISSING, looks_numeric
from posterity.datasets.reader import Records
from posterity.errors import BadData, shown

_NUMBERED = re.compile(r"x[1-9][0-9]*")


def take_header(records: Records, header: bool | None, target: str | None) -> tuple[tuple[str, ...], bool, list[str]]:
    """The names of the columns, whether the first record gives them, and what was decided in sentences.

    Without `header`, the first record names the columns if it has no number in it while the rest of some column
    is all numbers. Where no column is all numbers, it does unless the target is called like a column without
    a name (x1, x2, ...). Names that are empty become x1, x2, ... by position; names used twice are refused.
    """
    first = records.rows[0]
    notes: list[str] = []
    if header is None:
        header = _is_header(records, target)
        if not header:
            notes.append(f"The first line is data: the columns are called x1 to x{len(first)}.")
    if not header:
        return tuple(f"x{index}" for index in range(1, len(first) + 1)), False, notes
    names = tuple(name or f"x{index}" for index, name in enumerate(first, start=1))
    for index, name in enumerate(first, start=1):
        if not name:
            notes.append(f"Column {index} has no name and is called 'x{index}'.")
    _refuse_twice(names, records)
    for row, line in zip(records.rows[1:], records.lines[1:], strict=True):
        if row == first:
            raise BadData(f"{records.path}: line {line} names the columns again. Remove it.")
    return names, True, notes


def _is_header(records: Records, target: str | None) -> bool:
    first, rest = records.rows[0], records.rows[1:]
    numeric = [index for index, name in enumerate(first) if looks_numeric(name)]
    names = [index for index, name in enumerate(first) if index not in numeric and _numbers_below(name, index, rest)]
    if numeric and names:
        raise BadData(
            f"{records.path}: line {records.lines[0]} has the number {shown(first[numeric[0]])} in column "
            f"{numeric[0] + 1} and the text {shown(first[names[0]])} in column {names[0] + 1}, where all other lines "
            "have numbers: it may name the columns or be damaged. Say which (--header or --no-header)."
        )
    if numeric or names:
        return bool(names)
    return target is None or target in first or not _NUMBERED.fullmatch(target)


def _numbers_below(name: str, index: int, rows: Sequence[Sequence[str]]) -> bool:
    """Whether a column begins with text and then has numbers only, and at least one."""
    if name in MISSING:
        return False
    values = [row[index] for row in rows if row[index] not in MISSING]
    return bool(values) and all(map(looks_numeric, values))


def _refuse_twice(names: Sequence[str], records: Records) -> None:
    seen: dict[str, int] = {}
    for index, name in enumerate(names, start=1):
        if name in seen:
            raise BadData(
                f"{records.path}: line {records.lines[0]}: columns {seen[name]} and {index} have the same name "
                f"{shown(name)}. Give every column its own."
            )
        seen[name] = index
