"""Preprocessing of tables into tensors: the encodings of inputs and targets, stored with the run."""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from posterity.datasets.columns import Column, infer_decimal
from posterity.datasets.dataset import DataSet, LabelledData, Task
from posterity.datasets.encodings import InputColumn, TargetColumn, fit_input, fit_target
from posterity.datasets.table import Table, split, with_values
from posterity.errors import BadData, shown


class Transformed(NamedTuple):
    """Inputs (N, D) float32; targets (N, T) float32 or (N,) int64, or None; notes, sentences for the user."""

    inputs: Tensor
    targets: Tensor | None
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Preprocessing:
    """The encodings that a model fitted to one table needs to read another: plain values, stored with the model.

    `columns` are the names of all columns of the training file, in order, and `named` says whether the file gave
    them; `decimal` is its decimal mark. `notes` are sentences about how the columns were encoded. A regression may have
    `more_targets` than one.
    """

    inputs: tuple[InputColumn, ...]
    target: TargetColumn
    task: Task
    columns: tuple[str, ...]
    named: bool
    decimal: str
    notes: tuple[str, ...] = ()
    more_targets: tuple[TargetColumn, ...] = field(default=(), metadata={"stored": "if set"})

    @property
    def targets(self) -> tuple[TargetColumn, ...]:
        """The encodings of all targets."""
        return self.target, *self.more_targets

    def check(self) -> None:
        """Raise a ValueError unless the values make sense together; see `InputColumn.check`."""
        for column in self.inputs:
            column.check()
        for target in self.targets:
            target.check()
        inputs = {(column.name, column.part) for column in self.inputs}
        names = [*{name for name, _ in inputs}, *(target.name for target in self.targets)]
        unique = len(inputs) == len(self.inputs) and len(set(names)) == len(names)
        if not self.inputs or not unique or not set(names) <= set(self.columns):
            raise ValueError(
                f"Inputs and target must be columns of the file, {shown(self.columns)}. Got {shown(names)}."
            )
        suits = (self.task == "classification") == bool(self.target.classes)
        if not suits or any(target.classes for target in self.more_targets) or self.decimal not in (".", ","):
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
        index = None if rows is None else np.asarray(rows, dtype=np.int64)
        if not (len(table) if index is None else len(index)):
            raise ValueError("Preprocessing.fit: there must be at least one row. Got none.")
        notes: list[str] = []
        if log_target and roles.task != "regression":
            raise ValueError(f"--log-target is for regression, and the target {shown(roles.target)} has classes.")

        def own(column: Column) -> Column:  # one at a time, which takes less memory than all rows at once
            return column if index is None else column.rows(index)

        target, *more = (
            fit_target(own(table.column(name)), roles.kinds[name], roles.task, roles.decimal, log_target)
            for name in roles.targets
        )
        fitted = (
            fit_input(own(column), roles.kinds[column.name], roles.decimal, notes)
            for column in table.columns
            if column.name not in roles.targets
        )
        inputs = tuple(encoding for encodings in fitted for encoding in encodings)
        if not inputs:
            raise BadData(" ".join((f"{table.path}: no column is left as an input.", *notes)))
        return cls(inputs, target, roles.task, table.header, table.named, roles.decimal, tuple(notes), tuple(more))

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
            table = with_values(table, [target.name for target in self.targets], notes)
        decimal = table.roles.decimal if table.roles else table.decimal or self._decimal(table, wanted)
        known = set(self.columns)
        further = [name for name in table.names if name not in known]
        if further:
            notes.append(f"Columns that the model was fitted without are not used: {', '.join(map(shown, further))}.")
        blocks = [column.encode(table.column(column.name), decimal, notes) for column in self.inputs]
        inputs = torch.from_numpy(np.concatenate(blocks, axis=1))
        if not wanted:
            return Transformed(inputs, None, tuple(notes))
        encoded = [target.encode(table.column(target.name), decimal, notes) for target in self.targets]
        return Transformed(inputs, torch.cat(encoded, dim=-1), tuple(notes))

    def _decimal(self, table: Table, with_target: bool) -> str:
        numbers = [column.name for column in self.inputs if column.kind == "number"]
        if with_target:
            numbers += [target.name for target in self.targets if target.kind == "number"]
        return infer_decimal(map(table.column, numbers), table.separator, self.decimal)

    def _check_columns(self, table: Table) -> None:
        if self.named and not table.named:
            if table.columns[0].source != "text":
                raise BadData(
                    f"{table.path}: the columns have no names, but the model was fitted with named columns. "
                    f"Name them: {', '.join(map(shown, self.columns))}."
                )
            raise BadData(
                f"{table.path}: line {table.columns[0].lines[0]} is data, but the model was fitted with named columns. "
                f"Name them in the first line: {', '.join(map(shown, self.columns))}."
            )
        if not self.named and not table.named:  # unnamed columns are identified by their position
            count, whole = len(table.header), len(self.columns)
            last = tuple(target.name for target in self.targets)
            if count != whole and (count != whole - len(last) or self.columns[-len(last) :] != last):
                raise BadData(
                    f"{table.path}: the columns have no names, so there must be {whole} of them, as in the training "
                    f"file. Got {count}. Give all columns in the same order."
                )
        own = set(table.names)
        missing = list(dict.fromkeys(column.name for column in self.inputs if column.name not in own))
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
    parts: tuple[Tensor, Tensor] | None = None,
) -> PreparedTable:
    """Split the rows of a table read with a target, fit the preprocessing to the training rows, apply it to all.

    With the `preprocessing` of an earlier run on the same table, the rows are split and encoded as in that run. With
    `log_target` the logarithm of the target is what is predicted. `parts` are the training and test rows, where the
    seed shall not draw them.
    """
    classes = None
    if preprocessing is not None and preprocessing.target.classes:
        assert table.roles is not None
        classes = preprocessing.target.encode(table.column(preprocessing.target.name), table.roles.decimal, [])
    train, test = split(table, test_fraction, seed, classes) if parts is None else parts
    if preprocessing is None:
        preprocessing = Preprocessing.fit(table, train, log_target=log_target)
    inputs, targets, notes = preprocessing.transform(table)
    assert targets is not None
    rows = LabelledData(inputs, targets)
    data = DataSet(
        table.path.stem, preprocessing.task, rows.rows(train), rows.rows(test), preprocessing.target.classes or None
    )
    return PreparedTable(data, preprocessing, train, test, (*table.notes, *preprocessing.notes, *notes))
