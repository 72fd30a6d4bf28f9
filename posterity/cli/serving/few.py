"""Encoding of a few rows value by value: encoding them as columns would take longer than predicting."""

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
"""Most rows that are encoded value by value."""
NEAR = 0.5 * FURTHEST
"""Standard deviations from the mean within which numbers are encoded here, for runs without stored ranges."""
ENDS = ((-1.0, "low"), (1.0, "high"))


class FewRows:
    """Encodes rows that need no note: plain numbers within the training range, and categories of the training rows.

    Numbers are standardised as by `InputColumn.encode`. Categories are encoded by that method once, and cached.
    """

    def __init__(self, run: Run, names: Sequence[str]) -> None:
        """Take the run, and the names of the columns that it reads."""
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
        """Return inputs (N, D), outside columns and notes (none); None if a row needs the general encoding."""
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
                    if not low <= number <= high:  # its float32 is then inside too, as the ends are float32
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
    """Return the inputs of a category or a missing value, cached in `words`; None if it needs a note."""
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
