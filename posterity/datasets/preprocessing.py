"""From a table to tensors: what is learnt from its training rows, stored with the model, applied at prediction."""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from posterity.datasets.columns import infer_decimal
from posterity.datasets.dataset import DataSet, LabelledData, Task
from posterity.datasets.encoding import InputColumn, TargetColumn, fit_input, fit_target
from posterity.datasets.table import Table, split, with_values
from posterity.errors import BadData, shown


class Transformed(NamedTuple):
    """Inputs (N, D) float32; targets (N, 1) float32 or (N,) int64, or None; notes, sentences for the user."""

    inputs: Tensor
    targets: Tensor | None
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Preprocessing:
    """What a model that was fitted to a table needs in order to read another: plain values, stored with it.

    `columns` are the names of all columns of the training file, in order, and `named` says whether the file gave
    them; `decimal` is its decimal mark. `notes` are sentences about what became of the columns.
    """

    inputs: tuple[InputColumn, ...]
    target: TargetColumn
    task: Task
    columns: tuple[str, ...]
    named: bool
    decimal: str
    notes: tuple[str, ...] = ()

    @classmethod
    def fit(cls, table: Table, rows: Tensor | Sequence[int] | None = None) -> "Preprocessing":
        """Means, scales, medians, categories and classes of these rows (or all) of a table read with a target.

        A column with a single value in these rows is dropped, with a note. One of whole numbers that all differ,
        as those that number the rows do, is kept, with a note.
        """
        if (roles := table.roles) is None:
            raise ValueError("Preprocessing.fit: the table must be read with a target. Give read_table a target.")
        if rows is not None:
            table = table.rows(rows.tolist() if isinstance(rows, Tensor) else rows)
        if not len(table):
            raise ValueError("Preprocessing.fit: there must be at least one row. Got none.")
        notes: list[str] = []
        target = fit_target(table.column(roles.target), roles.kinds[roles.target], roles.task, roles.decimal)
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
        """The names of the D inputs."""
        return tuple(name for column in self.inputs for name in column.features)

    def transform(self, table: Table, targets: bool | None = None) -> Transformed:
        """The inputs of the rows of a table, whose columns are found by name, and their targets.

        Targets are given if the table was read with one, unless `targets` says otherwise; rows without a target
        are then left out, with a note, and else each row has its inputs. BadData where a column is missing or
        holds what cannot be of its kind; columns that the model does not know, and categories that no training
        row has, give a note.
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
        found = self.target.encode(table.column(self.target.name), decimal) if wanted else None
        return Transformed(torch.cat(blocks, dim=1), found, tuple(notes))

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
        if not self.named and not table.named:  # columns without names are known by their place alone
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
    """A table made ready for inference: the data set, how it was made, which rows it has, and all notes."""

    data: DataSet
    preprocessing: Preprocessing
    train: Tensor
    test: Tensor
    notes: tuple[str, ...]


def prepare(table: Table, test_fraction: float = 0.2, seed: int = 0) -> PreparedTable:
    """Split the rows of a table read with a target, fit the preprocessing to the training rows, apply it to all."""
    train, test = split(table, test_fraction, seed)
    preprocessing = Preprocessing.fit(table, train)
    inputs, targets, notes = preprocessing.transform(table)
    assert targets is not None
    rows = LabelledData(inputs, targets)
    data = DataSet(
        table.path.stem, preprocessing.task, rows.rows(train), rows.rows(test), preprocessing.target.classes or None
    )
    return PreparedTable(data, preprocessing, train, test, (*table.notes, *preprocessing.notes, *notes))
