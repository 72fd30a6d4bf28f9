"""Rows of plain values, encoded value by value: for few rows, whole columns would take longer than the predictions."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from posterity.cli.frame.folders import Run
from posterity.datasets.columns import Column
from posterity.datasets.encodings import FURTHEST, InputColumn
from posterity.datasets.fields import LARGEST_WHOLE
from posterity.errors import BadData

MOST = 64
"""Rows up to which values are encoded one by one."""
NEAR = 0.5 * FURTHEST
"""Standard deviations from the mean up to which a number of a run without ranges is encoded here."""
ENDS = ((-1.0, "low"), (1.0, "high"))


class FewRows:
    """Encodes rows in which nothing is to be said: plain numbers, and words that the training rows have.

    A number is standardised here as `InputColumn.encode` does, which makes of each word what is kept for the next one.
    """

    def __init__(self, run: Run, names: Sequence[str]) -> None:
        """Take the run, and the names of the columns that it needs."""
        fitted, part = run.preprocessing, run.reach
        columns = [InputColumn(name, "number") for name in names] if fitted is None else fitted.inputs
        self._known = frozenset(names if fitted is None else fitted.columns)
        self._suits = not any(column.part or column.sign for column in columns)
        self._judges = part is not None
        count = sum(len(column.features) for column in columns)
        low, high = ([sign * NEAR] * count if part is None else part.tensors[name].tolist() for sign, name in ENDS)
        starts = accumulate((len(column.features) for column in columns[:-1]), initial=0)
        self._columns = [
            (column, column.kind == "number", low[start], high[start], dict[tuple[type, Any], list[float]]())
            for column, start in zip(columns, starts, strict=True)
        ]

    def encoded(self, columns: Mapping[str, Sequence[Any]]) -> tuple[Tensor, list[str] | None, tuple[str, ...]] | None:
        """Return the inputs (N, D) of rows inside the training rows, what `outside` says, and no notes; else None."""
        count = len(next(iter(columns.values())))
        if count > MOST or not self._suits or not columns.keys() <= self._known:
            return None
        rows: list[list[float]] = [[] for _ in range(count)]
        for column, is_number, low, high, words in self._columns:
            for row, value in zip(rows, columns[column.name], strict=True):
                kind = type(value)
                if is_number and (kind is float or kind is int):
                    if not -LARGEST_WHOLE <= value <= LARGEST_WHOLE:
                        return None
                    number = (value - column.mean) / column.scale
                    if not low <= number <= high:  # so is what float32 makes of it, as the ends are of float32
                        return None
                    row.append(number)
                    if column.has_indicator:
                        row.append(0.0)
                else:
                    features = words.get((kind, value)) or _features(column, words, value)
                    if features is None:
                        return None
                    row += features
        return torch.tensor(rows, dtype=torch.float32, device="cpu"), [""] * count if self._judges else None, ()


def _features(column: InputColumn, words: dict[tuple[type, Any], list[float]], value: Any) -> list[float] | None:
    """The inputs of a word or a missing value, kept among the `words`; None where something is to be said."""
    if value is not None and (column.kind == "number" or not isinstance(value, (bool, str))):
        return None
    own, notes = Column.of_values(Path("rows"), column.name, [value], [0]), list[str]()
    assert own is not None
    try:
        (features,) = column.encode(own, ".", notes).tolist()
    except BadData:
        return None
    if notes:
        return None
    words[type(value), value] = features
    return list(features)
