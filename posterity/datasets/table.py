"""Tables of files and frames: their columns, the kinds of these, and the task of the target."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from posterity.datasets.columns import Column, infer_decimal
from posterity.datasets.dataset import Task
from posterity.datasets.dates import ORDERS
from posterity.datasets.fields import THOUSANDS
from posterity.datasets.files import HOST, content
from posterity.datasets.frames import Frame, frame_of
from posterity.datasets.kinds import MOST_CATEGORIES, Kind, class_names, classes_by_meaning, infer_kind
from posterity.datasets.packed import Sheet, typed_sheet, unpacked
from posterity.datasets.reader import read_records, take_header
from posterity.errors import BadData, shown, unknown
from posterity.numerics.random import Key

MOST_CLASSES = 10
"""A target with at most this many distinct whole numbers is read as classes, unless the task is given."""

MOST_REASONS = 20
"""How many refused columns a message explains; it names all of them."""


@dataclass(frozen=True, eq=False)
class Roles:
    """The targets of a table, their task, the kinds of the columns by name, and the decimal mark."""

    targets: tuple[str, ...]
    task: Task
    kinds: Mapping[str, Kind]
    decimal: str

    @property
    def target(self) -> str:
        """The first target."""
        return self.targets[0]


@dataclass(frozen=True, eq=False)
class Table:
    """The columns of a file or a frame; their `roles` if it was read with a target.

    `header` has the names of all columns, dropped ones included, and `named` says whether the file or frame gives them.
    `decimal` is the decimal mark if it was given. `category` are the columns whose values are categories whatever they
    look like. `notes` are sentences about what had to be decided.
    """

    path: Path
    header: tuple[str, ...]
    columns: tuple[Column, ...]
    separator: str
    named: bool
    notes: tuple[str, ...] = ()
    decimal: str | None = None
    category: frozenset[str] = frozenset()
    roles: Roles | None = None

    def __len__(self) -> int:
        """Number of rows N."""
        return len(self.columns[0])

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the columns."""
        return tuple(column.name for column in self.columns)

    def column(self, name: str) -> Column:
        """Return the column of this name; raises BadData with the nearest name when there is none."""
        if name not in self._by_name:
            file = not self.named and self.columns[0].source == "text"
            nameless = " The first line was taken as data; if it names the columns, say --header." if file else ""
            raise BadData(f"{self.path}: {unknown('column', name, self.names)}{nameless}")
        return self._by_name[name]

    @cached_property
    def _by_name(self) -> dict[str, Column]:
        return {column.name: column for column in self.columns}

    def rows(self, index: Any) -> "Table":
        """Return the table with these rows only; roles stay as they are."""
        return replace(self, columns=tuple(column.rows(index) for column in self.columns))


def read_table(
    path: str | Path,
    target: str | Sequence[str] | None = None,
    *,
    task: Literal["auto", "regression", "classification"] = "auto",
    drop: Collection[str] = (),
    category: Collection[str] = (),
    separator: str | None = None,
    decimal: str | None = None,
    header: bool | None = None,
    encoding: str | None = None,
    thousands: str | None = None,
    dates: Literal["day-first", "month-first"] | None = None,
    data: bytes | None = None,
) -> Table:
    """Read a table from a text file, exactly as written; raises BadData that names the line or column at fault.

    The text may be packed by gzip or zip. Parquet files and the first sheet of Excel workbooks are read, too: their
    values are typed, as in `as_table`, and `separator`, `decimal` and `encoding` have no use there.

    With a `target` the kind of every column is inferred, and columns that cannot be inputs (text, numbers that a
    float64 cannot hold, numbers mixed with text) are refused by name, all in one message; rows without a target are
    left out. Without a target, fields are only read, which is what `Preprocessing.transform` needs to predict. A
    regression may have several targets.

    `drop` names columns to leave out, `category` columns whose values are categories whatever they look like.
    `separator` ("comma", "semicolon", "tab", "pipe", "whitespace"), `decimal` ("." or ","), `header` (whether
    the first line names the columns) and `encoding` are inferred where they are not given; `notes` says what is
    unusual. `thousands` is the mark between groups of three digits: one of `,`, `.`, `'`, `_` and a space. A percent or
    currency sign that all fields of a column have does not count, but for a division by 100. `dates` says whether days
    or months come first in dates such as 1/2/2020, where none tells. `data` is the content of the file, where it is in
    memory already; `path` then only names it.

    A field is missing if it is empty or exactly NA, N/A, n/a, NaN, nan, null, NULL, None or ?. Spaces around fields
    do not count. A column is boolean if it has both words of true/false, yes/no or t/f, in any case, and no other.

    The task "auto" is classification for a target of text, booleans, or at most `MOST_CLASSES` distinct whole numbers
    of which some repeat; else regression.
    """
    if decimal not in (None, ".", ","):
        raise ValueError(f"read_table: decimal must be '.', ',' or None. Got {shown(decimal)}.")
    if thousands not in (None, *THOUSANDS) or (thousands is not None and thousands == decimal):
        other = ", and not the decimal mark" * (thousands == decimal)
        raise ValueError(
            f"read_table: thousands must be one of {' '.join(map(repr, THOUSANDS))}{other}. Got {thousands!r}."
        )
    if dates not in (None, *ORDERS):
        raise ValueError(f"read_table: dates must be day-first, month-first or None. Got {shown(dates)}.")
    path, targets = Path(path), _targets(target)
    decimal = decimal or {".": ",", ",": "."}.get(thousands or "")
    data = unpacked(content(path) if data is None else data, path)
    sheet = typed_sheet(data, path, header)
    if sheet is not None:
        table = _typed(sheet, path, "file", targets)
        return _settled(table, targets, task, drop, sheet.frame.categories | set(category))
    records = read_records(data, path, separator, encoding)
    del data
    names, named, notes = take_header(records, header, targets[0] if targets else None)
    lines = records.lines[named:]
    if not len(lines):
        raise BadData(f"{path}: the file has the names of {len(names)} columns and no rows.")
    columns = tuple(
        Column(path, name, fields[named:], lines, name in targets, thousands or "", dates or "")
        for name, fields in zip(names, records.columns, strict=True)
    )
    table = Table(path, names, columns, records.separator, named, (*records.notes, *notes), decimal)
    return _settled(table, targets, task, drop, frozenset(category))


def _typed(sheet: Sheet, path: Path, source: Literal["file", "frame"], targets: tuple[str, ...]) -> Table:
    frame = sheet.frame
    lengths = {len(array) for array in frame.columns.values()}
    if len(lengths) != 1 or lengths == {0}:
        raise BadData(f"{path}: every column must have as many rows, one at least. Got {sorted(lengths)}.")
    columns = tuple(
        Column(path, name, array, sheet.lines, name in targets, source=source) for name, array in frame.columns.items()
    )
    return Table(path, tuple(frame.columns), columns, "", frame.named, sheet.notes)


def as_table(
    data: Any,
    target: str | Sequence[str] | None = None,
    *,
    y: Any = None,
    names: Sequence[str] | None = None,
    task: Literal["auto", "regression", "classification"] = "auto",
    drop: Collection[str] = (),
    category: Collection[str] = (),
) -> Table:
    """Turn a pandas or polars DataFrame, Arrow table, 2-D array or tensor into a table of typed columns.

    Numbers, booleans, strings and dates are taken as typed, without a way through text; strings are looked at like
    fields of a file, and categorical columns are categories. Missing are NaN, None, NaT and pd.NA, and no word. Columns
    of arrays are called x1, x2, ..., unless there are `names`. The target is a column, or several, or comes as `y`: an
    array, a Series or a frame. Messages count rows from 0. Otherwise as `read_table`.

    >>> table = as_table(np.array([[1.0, np.nan], [2.0, 3.0], [4.0, 5.0]]), y=np.array([0.5, 1.5, 2.5]))
    >>> table.names, table.roles.task, table.column("x2").missing.tolist()
    (('x1', 'x2', 'y'), 'regression', [True, False, False])
    """
    path = Path("table")
    frame = frame_of(data, path, names)
    columns, targets, categories = frame.columns, _targets(target), frame.categories | set(category)
    if y is not None:
        if targets:
            raise ValueError("as_table: give the target as the name of a column or as y, not both.")
        own = frame_of(y, path, letter="y")
        single = not own.named and len(own.columns) == 1
        renamed = {name: "y" if single else name for name in own.columns}
        while taken := {name for name in renamed.values() if name in columns}:
            renamed = {name: f"target {new}" if new in taken else new for name, new in renamed.items()}
        columns = columns | {renamed[name]: array for name, array in own.columns.items()}
        targets, categories = tuple(renamed.values()), categories | {renamed[name] for name in own.categories}
    lines = np.arange(len(next(iter(columns.values()), ())))
    table = _typed(Sheet(Frame(columns, frame.named, categories), lines), path, "frame", targets)
    return _settled(table, targets, task, drop, categories)


def _targets(target: str | Sequence[str] | None) -> tuple[str, ...]:
    targets = () if target is None else (target,) if isinstance(target, str) else tuple(target)
    if len(set(targets)) < len(targets) or (target is not None and not targets):
        raise ValueError(f"target must be a column, or different columns. Got {shown(target)}.")
    return targets


def _settled(
    table: Table, targets: tuple[str, ...], task: str, drop: Collection[str], category: frozenset[str]
) -> Table:
    """Return the table without dropped columns and with its roles, if there are targets."""
    if task not in ("auto", "regression", "classification"):
        raise ValueError(f"read_table: task must be auto, regression or classification. Got {shown(task)}.")
    for name in targets:
        if name in drop:
            raise ValueError(f"read_table: column {shown(name)} cannot be both the target and dropped.")
    for name in drop:
        table.column(name)
    kept = tuple(column for column in table.columns if column.name not in drop)
    if not kept:
        wanted = "a target and an input column" if targets else "an input column"
        raise BadData(f"{table.path}: all of its columns are dropped. Keep {wanted}.")
    table = replace(table, columns=kept, category=category - set(drop))
    for name in table.category:
        table.column(name)
    return _with_roles(table, targets, task) if targets else table


def with_values(table: Table, targets: Sequence[str], notes: list[str]) -> Table:
    """Return the rows with a value in the target columns; notes how many have none."""
    columns = [table.column(name) for name in targets]
    for column in columns:
        if column.missing.all():
            raise BadData(f"{table.path}: the target {shown(column.name)} has no values.")
    missing = np.logical_or.reduce([column.missing for column in columns])
    present, without = np.flatnonzero(~missing), np.flatnonzero(missing)
    if not len(present):
        raise BadData(f"{table.path}: no row has a value in each of the targets {', '.join(map(shown, targets))}.")
    if not len(without):
        return table
    count = len(without)
    notes.append(
        f"{count} row{'s' * (count > 1)} without a value in the target {', '.join(map(shown, targets))} "
        f"{'were' if count > 1 else 'was'} left out, the first in {columns[0].place} {columns[0].lines[without[0]]}."
    )
    return table.rows(present)


def kinds_of(table: Table, notes: list[str]) -> tuple[dict[str, Kind], str]:
    """Infer the kinds of the columns from the rows of a table, and their decimal mark; refused columns are BadData."""
    decimal = table.decimal
    if decimal is None:
        decimal = infer_decimal((c for c in table.columns if c.name not in table.category), table.separator)
        if decimal == ",":
            notes.append("Numbers have a decimal comma.")
    kinds: dict[str, Kind] = {}
    refused: list[str] = []
    for column in table.columns:
        try:
            kinds[column.name] = infer_kind(column, decimal, column.name in table.category)
        except BadData as error:
            refused.append(str(error).removeprefix(f"{table.path}: "))
    if refused:
        if len(refused) == 1:
            raise BadData(f"{table.path}: {refused[0]}")
        listed = " ".join(f"({place}) {words}" for place, words in enumerate(refused[:MOST_REASONS], start=1))
        others = ", ".join(shown(column.name) for column in table.columns if column.name not in kinds)
        more = f" All of them: {others}." if len(refused) > MOST_REASONS else ""
        raise BadData(f"{table.path}: {len(refused)} columns cannot be used. {listed}{more}")
    return kinds, decimal


def _with_roles(table: Table, targets: tuple[str, ...], task: str) -> Table:
    """Return the table with its roles: kinds of columns, decimal mark, and the task."""
    notes = list(table.notes)
    table = with_values(table, targets, notes)
    if len(table) < 2:
        names = " and ".join(map(shown, targets))
        raise BadData(f"{table.path}: 1 row has the target {names}. Two at least are needed to learn from.")
    kinds, decimal = kinds_of(table, notes)
    tasks: dict[str, Task] = {name: _task(table.column(name), kinds[name], decimal, task, notes) for name in targets}
    for name, own in tasks.items():
        if len(targets) > 1 and own != "regression":
            raise BadData(
                f"{table.path}: several targets must be numbers to regress on, and {shown(name)} has classes. "
                "Say the task regression (--task), or give one target."
            )
    return replace(table, roles=Roles(targets, next(iter(tasks.values())), kinds, decimal), notes=tuple(notes))


def _task(column: Column, kind: Kind, decimal: str, task: str, notes: list[str]) -> Task:
    name = shown(column.name)
    number = kind == "number" and task != "classification"
    if kind == "constant" or (kind == "number" and len(np.unique(column.numbers(decimal))) == 1):
        raise BadData(
            f"{column.path}: the target {name} has the value {shown(column.fields[0])} in every row. "
            "There is nothing to learn: name another target."
        )
    if number and len(np.unique(column.numbers(decimal))) > MOST_CATEGORIES:
        return "regression"
    labels = class_names(column, kind, decimal)
    alike = classes_by_meaning(labels, kind, (decimal, column.thousands, column.sign))
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
    if number:
        few = len(alike) <= MOST_CLASSES and len(alike) < len(column)
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
    one row for training. `classes` are the class indices of the rows, by default of the labels as written.
    """
    if (roles := table.roles) is None:
        raise ValueError("split: the table must be read with a target. Give read_table a target.")
    labels = torch.zeros(len(table), dtype=torch.int64, device=HOST)
    if roles.task == "classification":
        if classes is None:
            target = table.column(roles.target)
            names = class_names(target, roles.kinds[target.name], roles.decimal)
            classes = torch.from_numpy(np.array([names.index(word) for word in target.words])[target.codes])
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
