"""Tables in text files (CSV, TSV and similar): columns as written, their kinds, and the task of the target."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from posterity.datasets.columns import (
    MISSING,
    MOST_CATEGORIES,
    Column,
    Kind,
    class_names,
    classes_by_meaning,
    infer_decimal,
    infer_kind,
)
from posterity.datasets.dataset import Task
from posterity.datasets.files import HOST
from posterity.datasets.reader import read_records, take_header
from posterity.errors import BadData, shown, unknown
from posterity.numerics.random import Key

MOST_CLASSES = 10
"""A target with at most this many distinct whole numbers is read as classes, unless the task is given."""


@dataclass(frozen=True, eq=False)
class Roles:
    """The target of a table, its task, the kinds of the columns by name, and the decimal mark."""

    target: str
    task: Task
    kinds: Mapping[str, Kind]
    decimal: str


@dataclass(frozen=True, eq=False)
class Table:
    """The columns of a file, as written; their `roles` if it was read with a target.

    `header` has the names of all columns of the file, dropped columns included, and `named` says whether the file gives
    them. `decimal` is the decimal mark if it was given. `notes` are sentences about what had to be decided.
    """

    path: Path
    header: tuple[str, ...]
    columns: tuple[Column, ...]
    separator: str
    named: bool
    notes: tuple[str, ...] = ()
    decimal: str | None = None
    roles: Roles | None = None

    def __len__(self) -> int:
        """Number of rows N."""
        return len(self.columns[0].fields)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the columns."""
        return tuple(column.name for column in self.columns)

    def column(self, name: str) -> Column:
        """Return the column of this name; raises BadData with the nearest name when there is none."""
        if name not in self.names:
            nameless = "" if self.named else " The first line was taken as data; if it names the columns, say --header."
            raise BadData(f"{self.path}: {unknown('column', name, self.names)}{nameless}")
        return self.columns[self.names.index(name)]

    def rows(self, index: Sequence[int]) -> "Table":
        """Return the table with these rows only; roles stay as they are."""
        return replace(self, columns=tuple(column.rows(index) for column in self.columns))


def read_table(
    path: str | Path,
    target: str | None = None,
    *,
    task: Literal["auto", "regression", "classification"] = "auto",
    drop: Collection[str] = (),
    category: Collection[str] = (),
    separator: str | None = None,
    decimal: str | None = None,
    header: bool | None = None,
    encoding: str | None = None,
) -> Table:
    """Read a table from a text file, exactly as written; raises BadData that names the line or column at fault.

    With a `target` the kind of every column is inferred, and columns that cannot be inputs (text, dates, numbers
    that a float64 cannot hold, numbers mixed with text) are refused by name; rows without a target are left out.
    Without a target, fields are only read, which is what `Preprocessing.transform` needs to predict.

    `drop` names columns to leave out, `category` columns whose values are categories whatever they look like.
    `separator` ("comma", "semicolon", "tab", "pipe", "whitespace"), `decimal` ("." or ","), `header` (whether
    the first line names the columns) and `encoding` are inferred where they are not given; `notes` says what is
    unusual.

    A field is missing if it is empty or exactly NA, N/A, n/a, NaN, nan, null, NULL, None or ?. Spaces around fields
    do not count. A column is boolean if it has both words of true/false, yes/no or t/f, in any case, and no other.

    The task "auto" is classification for a target of text, booleans, or at most `MOST_CLASSES` distinct whole numbers
    of which some repeat; else regression.
    """
    if decimal not in (None, ".", ","):
        raise ValueError(f"read_table: decimal must be '.', ',' or None. Got {shown(decimal)}.")
    if task not in ("auto", "regression", "classification"):
        raise ValueError(f"read_table: task must be auto, regression or classification. Got {shown(task)}.")
    records = read_records(path, separator, encoding)
    names, named, notes = take_header(records, header, target)
    rows, lines = records.rows[named:], tuple(records.lines[named:])
    if not rows:
        raise BadData(f"{records.path}: the file has the names of {len(names)} columns and no rows.")
    columns = tuple(
        Column(records.path, name, fields, lines, name == target)
        for name, fields in zip(names, zip(*rows, strict=True), strict=True)
    )
    table = Table(records.path, names, columns, records.separator, named, (*records.notes, *notes), decimal)
    table = _without(table, drop, target)
    for name in category:
        table.column(name)
    return table if target is None else _settled(table, target, task, frozenset(category))


def _without(table: Table, drop: Collection[str], target: str | None) -> Table:
    if target is not None and target in drop:
        raise ValueError(f"read_table: column {shown(target)} cannot be both the target and dropped.")
    for name in drop:
        table.column(name)
    kept = tuple(column for column in table.columns if column.name not in drop)
    if not kept:
        raise BadData(f"{table.path}: all of its columns are dropped. Keep a target and an input column.")
    return replace(table, columns=kept)


def with_values(table: Table, target: str, notes: list[str]) -> Table:
    """Return the rows with a value in the target column; notes how many have none."""
    column = table.column(target)
    present = [row for row, field in enumerate(column.fields) if field not in MISSING]
    if not present:
        raise BadData(f"{table.path}: the target {shown(target)} has no values.")
    missing = len(table) - len(present)
    if not missing:
        return table
    first = next(line for field, line in zip(column.fields, column.lines, strict=True) if field in MISSING)
    notes.append(
        f"{missing} row{'s' * (missing > 1)} without a value in the target {shown(target)} "
        f"{'were' if missing > 1 else 'was'} left out, the first in line {first}."
    )
    return table.rows(present)


def _settled(table: Table, target: str, task: str, category: frozenset[str]) -> Table:
    notes = list(table.notes)
    table = with_values(table, target, notes)
    decimal = table.decimal
    if decimal is None:
        decimal = infer_decimal((c for c in table.columns if c.name not in category), table.separator)
        if decimal == ",":
            notes.append("Numbers have a decimal comma.")
    kinds: dict[str, Kind] = {
        column.name: infer_kind(column, decimal, column.name in category) for column in table.columns
    }
    column = table.column(target)
    labels = class_names(column, kinds[target], decimal)
    alike = classes_by_meaning(labels, kinds[target], decimal)
    if len(labels) == 1 or (len(alike) == 1 and kinds[target] == "number"):
        raise BadData(
            f"{table.path}: the target {shown(target)} has the value {shown(labels[0])} in every row. "
            "There is nothing to learn: name another target."
        )
    roles = Roles(target, _task(column, kinds[target], labels, alike, task, notes), kinds, decimal)
    return replace(table, roles=roles, notes=tuple(notes))


def _task(
    column: Column,
    kind: Kind,
    labels: tuple[str, ...],
    alike: Mapping[str | float, list[str]],
    task: str,
    notes: list[str],
) -> Task:
    name = shown(column.name)
    if task == "regression":
        if kind == "number":
            return "regression"
        raise BadData(
            f"{column.path}: the target {name} of a regression must be numbers. Got {kind} values such as "
            f"{shown(column.fields[0])}. Use the task classification (--task)."
        )
    if task == "classification" and len(labels) > MOST_CATEGORIES:
        raise BadData(
            f"{column.path}: the target {name} of a classification may have {MOST_CATEGORIES} different values. "
            f"Got {len(labels)}. Use the task regression (--task)."
        )
    if task != "classification" and kind == "number":
        few = len(alike) <= MOST_CLASSES and len(alike) < len(column.fields)
        if not few or not all(float(value).is_integer() for value in alike):
            return "regression"
        notes.append(
            f"The target {name} has {len(alike)} different whole numbers: they are taken as classes. "
            "If they are amounts, say so (--task regression)."
        )
    several = [spellings for spellings in alike.values() if len(spellings) > 1]
    if several:
        same = "are the same number" if kind == "number" else "differ only in case"
        notes.append(
            f"The target {name} has labels that {same}: {', '.join(map(shown, several[0]))}. Each is a class of its "
            "own, as written. If they are one class, write them alike in the file."
        )
    return "classification"


def split(
    table: Table, test_fraction: float, seed: int = 0, classes: Sequence[int] | Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Split a table with a target into training and test rows by the seed: two sorted int64 tensors.

    For classification each class is split in this proportion, as near as whole rows allow, and keeps at least
    one row for training. `classes` are the class indices of the rows, by default those of the labels as written.
    """
    if (roles := table.roles) is None:
        raise ValueError("split: the table must be read with a target. Give read_table a target.")
    labels = torch.zeros(len(table), dtype=torch.int64, device=HOST)
    if roles.task == "classification":
        if classes is None:
            target = table.column(roles.target)
            slots = {
                label: slot for slot, label in enumerate(class_names(target, roles.kinds[target.name], roles.decimal))
            }
            classes = [slots[field] for field in target.fields]
        labels = torch.as_tensor(classes, dtype=torch.int64, device=HOST)
    return stratified(labels, test_fraction, seed)


def stratified(labels: Tensor, test_fraction: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Draw training and test rows (sorted int64) by the seed, with `test_fraction` of each label in the test rows."""
    if not isinstance(test_fraction, (int, float)) or not 0 < test_fraction < 1:
        raise ValueError(f"split: test_fraction must be between 0 and 1. Got {shown(test_fraction)}.")
    counts = torch.bincount(labels).tolist()
    quota = [int(count * test_fraction) for count in counts]
    wanted = max(1, round(test_fraction * len(labels)))
    by_need = sorted(range(len(counts)), key=lambda label: quota[label] - counts[label] * test_fraction)
    while sum(quota) < wanted and any(some < count - 1 for some, count in zip(quota, counts, strict=True)):
        for label in by_need:  # the largest remainder first
            if sum(quota) < wanted and quota[label] < counts[label] - 1:
                quota[label] += 1
    if not any(quota):
        raise BadData(f"split: {len(labels)} rows leave none for testing. Give more rows of each class.")
    key = Key(seed).fold("split")
    test = []
    for label, count in enumerate(quota):
        members = torch.nonzero(labels == label)[:, 0]
        test.append(members[key.fold(label).permutation(len(members))[:count]])
    chosen = torch.cat(test).sort().values
    mask = torch.ones(len(labels), dtype=torch.bool, device=labels.device)
    mask[chosen] = False
    return torch.nonzero(mask)[:, 0], chosen
