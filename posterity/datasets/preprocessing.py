"""Preprocessing of tables into tensors: encodings of inputs and targets, stored with the run."""

import difflib
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from posterity.datasets.columns import (
    MISSING,
    Column,
    Kind,
    boolean_words,
    class_names,
    classes_by_meaning,
    has_leading_zeros,
    infer_decimal,
)
from posterity.datasets.dataset import DataSet, LabelledData, Task
from posterity.datasets.files import HOST
from posterity.datasets.table import Table, split, with_values
from posterity.errors import BadData, shown

FEWEST_IDS = 10
"""Fewest rows from which distinct whole numbers are noted to look like row numbers."""


@dataclass(frozen=True)
class InputColumn:
    """The encoding of a column as inputs.

    Numbers, and booleans as 0 and 1 (`categories` holds their two words as first written), give
    (value - `mean`) / `scale`; `fill`, the median of the training rows, replaces missing values. Categories are
    one-hot; a category that no training row has gives zeros only. With `has_indicator`, set where the training rows
    had missing values, one more input is 1 where the value is missing.
    """

    name: str
    kind: Literal["number", "boolean", "category"]
    mean: float = 0.0
    scale: float = 1.0
    fill: float = 0.0
    categories: tuple[str, ...] = ()
    has_indicator: bool = False

    def check(self) -> None:
        """Raise a ValueError unless the values make sense together, as they may not when they come from a file."""
        _check_encoding(self.name, self.mean, self.scale, self.fill, self.categories)
        if len(self.categories) != {"number": 0, "boolean": 2}.get(self.kind, len(self.categories) or 1):
            raise ValueError(f"Column {shown(self.name)} is a {self.kind}, and cannot have {shown(self.categories)}.")

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the inputs.

        >>> InputColumn("size", "category", categories=("L", "S"), has_indicator=True).features
        ('size=L', 'size=S', 'size missing')
        """
        values = tuple(f"{self.name}={value}" for value in self.categories)
        return (values if self.kind == "category" else (self.name,)) + (f"{self.name} missing",) * self.has_indicator

    def encode(self, column: Column, decimal: str, notes: list[str]) -> Tensor:
        """Return the inputs (N, width) of a column in float32; notes what the training rows did not have."""
        missing = torch.tensor([field in MISSING for field in column.fields], dtype=torch.bool, device=HOST)
        if self.kind == "category":
            values = self._one_hot(column, notes)
        else:
            numbers = column.truths(self.categories) if self.kind == "boolean" else column.numbers(decimal)
            values = standardised(column, numbers, self.mean, self.scale, self.fill)
        if self.has_indicator:
            return torch.cat((values, missing[:, None].float()), dim=1)
        if missing.any():
            stands_in = "no category is set" if self.kind == "category" else f"the median {self.fill:g} stands in"
            notes.append(
                f"Column {shown(self.name)}: {int(missing.sum())} of {len(missing)} values are missing, as none was in "
                f"the training rows; {stands_in} for them."
            )
        return values

    def _one_hot(self, column: Column, notes: list[str]) -> Tensor:
        slots = {category: slot for slot, category in enumerate(self.categories)}
        values = torch.zeros(len(column.fields), len(slots), dtype=torch.float32, device=HOST)  # (N, C)
        unseen: Counter[str] = Counter()
        for row, field in enumerate(column.fields):
            if field in slots:
                values[row, slots[field]] = 1.0
            elif field not in MISSING:
                unseen[field] += 1
        if unseen:
            named = ", ".join(shown(field) for field in sorted(unseen)[:5]) + ", ..." * (len(unseen) > 5)
            notes.append(
                f"Column {shown(self.name)}: {unseen.total()} of {len(column.fields)} values are categories that no "
                f"training row has ({named}); no category is set for them."
            )
        return values


@dataclass(frozen=True)
class TargetColumn:
    """The encoding of the target: (value - `mean`) / `scale` in regression, else the index among `classes`.

    With `log` the value is the logarithm of what the file has. `classes` are labels as the training file writes them. A
    label of another file that is written otherwise is taken as the class of the same number, or of the same word of a
    boolean column in another case, where there is just one.
    """

    name: str
    kind: Literal["number", "boolean", "category"]
    mean: float = 0.0
    scale: float = 1.0
    classes: tuple[str, ...] = ()
    log: bool = False

    def check(self) -> None:
        """Raise a ValueError unless the values make sense together; see `InputColumn.check`."""
        _check_encoding(self.name, self.mean, self.scale, 0.0, self.classes)
        if len(self.classes) == 1:
            raise ValueError(f"The target {shown(self.name)} must have two classes or more. Got {shown(self.classes)}.")

    def encode(self, column: Column, decimal: str, notes: list[str]) -> Tensor:
        """Return the targets of a column without missing values: (N, 1) float32, or (N,) int64 class indices."""
        if not self.classes:
            values = column.numbers(decimal)
            return standardised(column, _logarithms(column, values) if self.log else values, self.mean, self.scale)
        slots = {label: slot for slot, label in enumerate(self.classes)}
        other = {label: self._other_spelling(label, decimal) for label in set(column.fields) - slots.keys()}
        for row, label in enumerate(column.fields):
            if label not in slots and other[label] is None:
                raise BadData(
                    f"{column.at(row)}: {shown(label)} is not a class of the training rows, which are "
                    f"{shown(self.classes)}. Correct it, or fit with rows of every class."
                )
        if other:
            named = ", ".join(f"{shown(label)} for {shown(known)}" for label, known in sorted(other.items())[:5])
            notes.append(
                f"The target {shown(self.name)} has labels that are written otherwise than in the training rows "
                f"({named}{', ...' * (len(other) > 5)}); they are taken as the same classes."
            )
        slots.update({label: slots[known] for label, known in other.items() if known is not None})
        return torch.tensor([slots[label] for label in column.fields], dtype=torch.int64, device=HOST)

    def _other_spelling(self, label: str, decimal: str) -> str | None:
        """Return the only class that a label means in another spelling; None where there is none."""
        if self.kind == "category":
            return None
        (meaning,) = classes_by_meaning((label,), self.kind, decimal)
        known = classes_by_meaning(self.classes, self.kind).get(meaning, [])
        return known[0] if len(known) == 1 else None


def _check_encoding(name: str, mean: float, scale: float, fill: float, words: Sequence[str]) -> None:
    if not (math.isfinite(mean) and math.isfinite(fill) and math.isfinite(scale) and scale > 0):
        raise ValueError(
            f"Column {shown(name)} must have a finite mean and median, and a positive scale. "
            f"Got {mean:g}, {fill:g} and {scale:g}."
        )
    if len(set(words)) != len(words):
        raise ValueError(f"Column {shown(name)} must have different words. Got {shown(words)}.")


def fit_input(column: Column, kind: Kind, decimal: str, notes: list[str]) -> InputColumn | None:
    """Fit the encoding of a column to its rows; None, with a note, where they have no values or a single one."""
    if column.missing == len(column.fields):
        notes.append(f"Column {shown(column.name)} has no values and was dropped.")
        return None
    encoding = None
    if kind == "category":
        encoding = _fit_category(column, notes)
    elif kind in ("number", "boolean"):
        encoding = _fit_numbers(column, kind, decimal, notes)
    if encoding is None:
        notes.append(f"Column {shown(column.name)} is constant and was dropped.")
    return encoding


def fit_target(column: Column, kind: Kind, task: Task, decimal: str, log: bool = False) -> TargetColumn:
    """Fit the encoding of the target, or of its logarithm, to its rows; raises BadData where they are all the same."""
    assert kind in ("number", "boolean", "category")
    if task == "classification":
        classes = class_names(column, kind, decimal)
        if len(classes) > 1:
            return TargetColumn(column.name, kind, classes=classes)
    else:
        values = column.numbers(decimal)
        known = _logarithms(column, values) if log else values
        mean, scale = _moments([value for value in known if value is not None])
        if scale > 0:
            return TargetColumn(column.name, kind, mean, scale, log=log)
    raise BadData(
        f"{column.path}: the target {shown(column.name)} is the same in all training rows. There is nothing to learn."
    )


def _logarithms(column: Column, values: list[float | None]) -> list[float | None]:
    """Take the logarithm of each value; raises BadData at one that has none."""
    for row, value in enumerate(values):
        if value is not None and value <= 0:
            raise BadData(
                f"{column.at(row)}: {shown(column.fields[row])} has no logarithm: --log-target needs targets above 0. "
                "Leave --log-target out, or the row."
            )
    return [None if value is None else math.log(value) for value in values]


def standardised(
    column: Column, values: list[float | None], mean: float, scale: float, fill: float = math.nan
) -> Tensor:
    """Return (value - mean) / scale (N, 1) in float32, with `fill` for None; raises BadData on overflow."""
    filled = torch.tensor([fill if value is None else value for value in values], dtype=torch.float64, device=HOST)
    result = ((filled - mean) / scale).float()
    beyond = torch.nonzero(~result.isfinite())
    if len(beyond):
        row = int(beyond[0])
        raise BadData(
            f"{column.at(row)}: {shown(column.fields[row])} is too far from the training rows, whose mean is {mean:g} "
            f"and standard deviation {scale:g}. Correct it."
        )
    return result[:, None]


def _fit_category(column: Column, notes: list[str]) -> InputColumn | None:
    categories, missing = tuple(sorted(set(column.fields) - MISSING)), column.missing
    if len(categories) + bool(missing) < 2:
        return None
    own = f", and the missing values ({missing} of {len(column.fields)}) as one more" if missing else ""
    count = f"{len(categories)} categor{'ies' if len(categories) > 1 else 'y'}"
    notes.append(f"Column {shown(column.name)} is taken as {count}{own}.")
    return InputColumn(column.name, "category", categories=categories, has_indicator=missing > 0)


def _fit_numbers(
    column: Column, kind: Literal["number", "boolean"], decimal: str, notes: list[str]
) -> InputColumn | None:
    words = boolean_words(column) if kind == "boolean" else ()
    values = column.truths(words) if words else column.numbers(decimal)
    known = [value for value in values if value is not None]
    mean, scale = _moments(known)
    if scale == 0:
        return None
    name, count = shown(column.name), len(values)
    missing, fill = count - len(known), statistics.median_low(known)
    if missing:
        notes.append(
            f"Column {name}: {missing} of {count} values are missing; the median {fill:g} stands in for them, "
            "and one more input says where."
        )
    if zeros := has_leading_zeros(column):
        notes.append(
            f"Column {name} has whole numbers with zeros in front, as {zeros}. If they are codes, "
            f"use --category {name}."
        )
    if kind == "number" and count >= FEWEST_IDS and len(set(known)) == count and all(v.is_integer() for v in known):
        notes.append(
            f"Column {name} has another whole number in every row and is an input. If it only numbers the rows, "
            f"use --drop {name}."
        )
    return InputColumn(column.name, kind, mean, scale, fill, words, missing > 0)


def _moments(values: list[float]) -> tuple[float, float]:
    """Return mean and population standard deviation, which is 0 where the values do not differ in float64."""
    if min(values) == max(values):
        return values[0], 0.0
    unit = 2.0 ** (math.frexp(max(map(abs, values)))[1] - 1)  # squares of large numbers would overflow
    scaled = [value / unit for value in values]
    mean = math.fsum(scaled) / len(scaled)
    variance = math.fsum((value - mean) ** 2 for value in scaled) / len(scaled)
    return mean * unit, math.sqrt(variance) * unit


class Transformed(NamedTuple):
    """Inputs (N, D) float32; targets (N, 1) float32 or (N,) int64, or None; notes, sentences for the user."""

    inputs: Tensor
    targets: Tensor | None
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Preprocessing:
    """The encodings that a model fitted to one table needs to read another: plain values, stored with the model.

    `columns` are the names of all columns of the training file, in order, and `named` says whether the file gave
    them; `decimal` is its decimal mark. `notes` are sentences about how the columns were encoded.
    """

    inputs: tuple[InputColumn, ...]
    target: TargetColumn
    task: Task
    columns: tuple[str, ...]
    named: bool
    decimal: str
    notes: tuple[str, ...] = ()

    def check(self) -> None:
        """Raise a ValueError unless the values make sense together; see `InputColumn.check`."""
        for column in self.inputs:
            column.check()
        self.target.check()
        names = [*(column.name for column in self.inputs), self.target.name]
        if not self.inputs or len(set(names)) != len(names) or not set(names) <= set(self.columns):
            raise ValueError(
                f"Inputs and target must be columns of the file, {shown(self.columns)}. Got {shown(names)}."
            )
        if (self.task == "classification") != bool(self.target.classes) or self.decimal not in (".", ","):
            raise ValueError(f"The target {shown(self.target.name)} must suit the task {self.task}.")

    @classmethod
    def fit(
        cls, table: Table, rows: Tensor | Sequence[int] | None = None, *, log_target: bool = False
    ) -> "Preprocessing":
        """Fit means, scales, medians, categories and classes to these rows (or all) of a table read with a target.

        With `log_target` the logarithm of the target is standardised, which must be a number above 0 in every row.
        A column with a single value in these rows is dropped, with a note. A column of distinct whole numbers, which
        may number the rows, is kept, with a note.
        """
        if (roles := table.roles) is None:
            raise ValueError("Preprocessing.fit: the table must be read with a target. Give read_table a target.")
        if rows is not None:
            table = table.rows(rows.tolist() if isinstance(rows, Tensor) else rows)
        if not len(table):
            raise ValueError("Preprocessing.fit: there must be at least one row. Got none.")
        notes: list[str] = []
        if log_target and roles.task != "regression":
            raise ValueError(f"--log-target is for regression, and the target {shown(roles.target)} has classes.")
        target = fit_target(
            table.column(roles.target), roles.kinds[roles.target], roles.task, roles.decimal, log_target
        )
        fitted = [
            fit_input(column, roles.kinds[column.name], roles.decimal, notes)
            for column in table.columns
            if column.name != roles.target
        ]
        inputs = tuple(column for column in fitted if column is not None)
        if not inputs:
            raise BadData(" ".join((f"{table.path}: no column is left as an input.", *notes)))
        return cls(inputs, target, roles.task, table.header, table.named, roles.decimal, tuple(notes))

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the D inputs."""
        return tuple(name for column in self.inputs for name in column.features)

    def transform(self, table: Table, targets: bool | None = None) -> Transformed:
        """Encode the rows of a table, whose columns are found by name, as inputs and targets.

        Targets are returned if the table was read with one, unless `targets` says otherwise; rows without a target
        are then left out, with a note. Raises BadData where a column is missing or a field has the wrong kind;
        unknown columns, and categories that no training row has, give a note.
        """
        self._check_columns(table)
        notes: list[str] = []
        wanted = table.roles is not None if targets is None else targets
        if wanted:
            table = with_values(table, self.target.name, notes)
        decimal = table.roles.decimal if table.roles else table.decimal or self._decimal(table, wanted)
        further = [name for name in table.names if name not in self.columns]
        if further:
            notes.append(f"Columns that the model was fitted without are not used: {', '.join(map(shown, further))}.")
        blocks = [column.encode(table.column(column.name), decimal, notes) for column in self.inputs]
        encoded = self.target.encode(table.column(self.target.name), decimal, notes) if wanted else None
        return Transformed(torch.cat(blocks, dim=1), encoded, tuple(notes))

    def _decimal(self, table: Table, with_target: bool) -> str:
        numbers = [column.name for column in self.inputs if column.kind == "number"]
        if with_target and self.target.kind == "number":
            numbers.append(self.target.name)
        return infer_decimal(map(table.column, numbers), table.separator, self.decimal)

    def _check_columns(self, table: Table) -> None:
        if self.named and not table.named:
            raise BadData(
                f"{table.path}: line {table.columns[0].lines[0]} is data, but the model was fitted with named columns. "
                f"Name them in the first line: {', '.join(map(shown, self.columns))}."
            )
        if not self.named and not table.named:  # unnamed columns are identified by their position
            count, whole = len(table.header), len(self.columns)
            if count != whole and not (count == whole - 1 and self.columns[-1] == self.target.name):
                raise BadData(
                    f"{table.path}: the columns have no names, so there must be {whole} of them, as in the training "
                    f"file. Got {count}. Give all columns in the same order."
                )
        missing = [column.name for column in self.inputs if column.name not in table.names]
        if missing:
            near = difflib.get_close_matches(missing[0], table.names, n=1, cutoff=0.5)
            hint = f"The nearest is {shown(near[0])}." if near else f"It has {', '.join(map(shown, table.names))}."
            if table.named and not self.named:
                hint += " If its first line is data, say --no-header."
            names = ", ".join(map(shown, missing))
            raise BadData(f"{table.path}: column {names} is missing, which the model was fitted with. {hint}")


class PreparedTable(NamedTuple):
    """A table prepared for inference: the data set, its preprocessing, its training and test rows, and all notes."""

    data: DataSet
    preprocessing: Preprocessing
    train: Tensor
    test: Tensor
    notes: tuple[str, ...]


def prepare(
    table: Table,
    test_fraction: float = 0.2,
    seed: int = 0,
    preprocessing: Preprocessing | None = None,
    *,
    log_target: bool = False,
) -> PreparedTable:
    """Split the rows of a table read with a target, fit the preprocessing to the training rows, apply it to all.

    With `preprocessing`, that of an earlier run on the same table, the rows are split and encoded as in that run. With
    `log_target` the logarithm of the target is what is predicted.
    """
    classes = None
    if preprocessing is not None and preprocessing.target.classes:
        assert table.roles is not None
        classes = preprocessing.target.encode(table.column(preprocessing.target.name), table.roles.decimal, [])
    train, test = split(table, test_fraction, seed, classes)
    if preprocessing is None:
        preprocessing = Preprocessing.fit(table, train, log_target=log_target)
    inputs, targets, notes = preprocessing.transform(table)
    assert targets is not None
    rows = LabelledData(inputs, targets)
    data = DataSet(
        table.path.stem, preprocessing.task, rows.rows(train), rows.rows(test), preprocessing.target.classes or None
    )
    return PreparedTable(data, preprocessing, train, test, (*table.notes, *preprocessing.notes, *notes))
