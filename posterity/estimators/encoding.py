"""Conversion of frames and arrays to tensors: inputs, targets and weights of an estimator."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from posterity.datasets import InputColumn, as_table
from posterity.datasets.encodings import fit_input
from posterity.datasets.table import Table, kinds_of
from posterity.errors import BadData, shown


def checked(array: Any, **settings: Any) -> Any:
    """Return `check_array(...)` of scikit-learn, which has no types that mypy could use."""
    from sklearn.utils import check_array  # takes seconds to import

    return check_array(array, **settings)


@dataclass(frozen=True)
class Encoding:
    """The encodings of the columns of X: plain values, stored with the estimator.

    `names` are the names of all columns, x1, x2, ... where X gives none; `decimal` is the decimal mark of numbers in
    strings. A column of X without a value, or with a single one, has no encoding.
    """

    inputs: tuple[InputColumn, ...]
    names: tuple[str, ...]
    decimal: str = "."

    def check(self) -> None:
        """Raise a ValueError unless the values make sense together, as they may not when they come from a file."""
        for column in self.inputs:
            column.check()
        known = {column.name for column in self.inputs}
        if not self.inputs or not known <= set(self.names):
            raise ValueError(f"Inputs must be columns of X, {shown(self.names)}. Got {shown(sorted(known))}.")

    @classmethod
    def fit(
        cls, X: Any, weights: Any, notes: list[str], *, category: Collection[str] = (), drop: Collection[str] = ()
    ) -> "Encoding":
        """Fit to the rows of X with positive weights (N,); raises BadData where no column is left as an input.

        Rows of weight 0 decide nothing, not even the kinds of columns. `category` names columns to take as categories,
        `drop` columns to leave out. Means and scales count each row by its weight: a weight of 2 is a row twice.
        """
        kept = np.flatnonzero(weights > 0)
        whole = as_table(X, category=category, drop=drop)
        table = whole if len(kept) == len(weights) else whole.rows(kept)
        kinds, decimal = kinds_of(table, notes)
        inputs = [
            _weighted(encoding, column, decimal, weights[kept])
            for column in table.columns
            for encoding in fit_input(column, kinds[column.name], decimal, notes)
        ]
        if not inputs:
            raise BadData(" ".join(("No column of X is left as an input.", *notes)))
        return cls(tuple(inputs), table.header, decimal)

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the D inputs of the network."""
        return tuple(name for column in self.inputs for name in column.features)

    def transform(self, X: Any, notes: list[str], rows: Any = None) -> Tensor:
        """Return the inputs (N, D) in float32, of all rows or some; notes what the training rows did not have."""
        table: Table = as_table(X, names=self.names)
        table = table if rows is None else table.rows(rows)
        blocks = [column.encode(table.column(column.name), self.decimal, notes) for column in self.inputs]
        return torch.from_numpy(np.concatenate(blocks, axis=1))


def _weighted(encoding: InputColumn, column: Any, decimal: str, weights: Any) -> InputColumn:
    """Return the encoding with the weighted mean and standard deviation of its column; its median is unweighted."""
    if encoding.kind == "category" or encoding.part or (weights == weights[0]).all():
        return encoding
    values = column.truths(encoding.categories) if encoding.kind == "boolean" else column.numbers(decimal)
    known = ~np.isnan(values)
    values, shares = values[known], weights[known] / weights[known].sum()
    mean = shares @ values
    scale = np.sqrt(shares @ (values - mean) ** 2)
    return replace(encoding, mean=float(mean), scale=float(scale)) if scale > 0 else encoding


def as_rows(X: Any) -> Any:
    """Return frames unchanged and other tables as arrays (N, D) of numbers or objects; raise BadData otherwise.

    Missing values may be NaN or None.
    """
    if hasattr(X, "iloc") or hasattr(X, "__arrow_c_stream__"):
        if len(X.shape) != 2:
            raise BadData(f"X must have rows and columns. Got a Series of {len(X)}. Reshape your data: X.to_frame().")
        for count, word in zip(X.shape, ("sample", "feature"), strict=True):
            if not count:
                raise BadData(f"X has 0 {word}(s) (shape={tuple(X.shape)}) while a minimum of 1 is required.")
        names = list(X.columns) if hasattr(X, "columns") else []
        if twice := [name for index, name in enumerate(names) if name in names[:index]]:
            raise BadData(f"X has two columns of the same name {shown(twice[0])}. Give every column its own.")
        return X
    if isinstance(X, Tensor):
        X = as_array(X, "X")
    return checked(X, dtype=None, ensure_all_finite=False, input_name="X")


def as_targets(y: Any) -> Any:
    """Return the targets of a regression, (N,) or (N, T) in float64; raise BadData unless they are finite numbers."""
    array = checked(as_array(y, "y"), dtype=None, ensure_2d=False, input_name="y", ensure_all_finite=False)
    text = next((value for value in array.flat if isinstance(value, str)), None) if array.dtype.kind in "OU" else None
    if text is not None:
        raise BadData(
            f"y must hold numbers. Got {shown(str(text))}. Convert it, or use BayesianClassifier for classes."
        )
    array = checked(array, dtype=np.float64, ensure_2d=False, input_name="y")
    if array.ndim == 2 and not array.shape[1]:
        raise BadData(f"y must have a column for each target. Got shape {array.shape}.")
    return array


def as_labels(y: Any) -> Any:
    """Return the labels of a classification as an array (N,); raise BadData if one is missing."""
    from sklearn.utils import column_or_1d
    from sklearn.utils.multiclass import check_classification_targets

    labels = column_or_1d(as_array(y, "y"), warn=True)
    missing = [row for row, label in enumerate(labels.tolist()) if label is None or label != label]
    if missing:
        raise BadData(f"y must have a label in every row. Got none in row {missing[0]}: input contains NaN. Drop it.")
    if labels.dtype.kind == "f":
        checked(labels, ensure_2d=False, input_name="y")  # refuses infinities
    check_classification_targets(labels)
    return labels


def as_weights(sample_weight: Any, count: int) -> Any:
    """Return the weights of the rows (N,) in float64, ones for None; raise BadData for invalid ones."""
    if sample_weight is None:
        return np.ones(count)
    try:
        weights = np.asarray(as_array(sample_weight, "sample_weight"), dtype=np.float64)
    except (TypeError, ValueError):
        raise BadData(f"sample_weight must have one number for each row. Got {shown(sample_weight)}.") from None
    if weights.ndim == 0:
        weights = np.full(count, float(weights))
    if weights.shape != (count,):
        raise BadData(f"sample_weight must have one number for each row, ({count},). Got shape {weights.shape}.")
    bad = ~(np.isfinite(weights) & (weights >= 0))
    if bad.any():
        row = int(bad.argmax())
        raise BadData(f"sample_weight must be finite and at least 0. Got {weights[row]:g} in row {row}.")
    if not weights.any():
        raise BadData("sample_weight must have a number that is not zero. Got zeros only.")
    return weights


def moments(values: Any, weights: Any) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the weighted means and standard deviations of columns (N, T); raises BadData where one is constant.

    >>> moments(np.array([[1.0, 5.0], [3.0, 9.0]]), np.ones(2))
    ((2.0, 7.0), (1.0, 2.0))
    """
    constant = np.flatnonzero((values == values[0]).all(0))
    if len(constant) and len(values) > 1:
        raise BadData(f"y has the value {values[0, constant[0]]:g} in every row. There is nothing to learn.")
    shares = (weights / weights.sum())[:, None]
    unit = np.maximum(np.abs(values).max(0), np.finfo(np.float64).tiny)  # squares of large numbers would overflow
    scaled = values / unit
    mean = (shares * scaled).sum(0)
    scale = unit * np.sqrt((shares * (scaled - mean) ** 2).sum(0))
    return tuple((mean * unit).tolist()), tuple(np.where(scale > 0, scale, 1.0).tolist())


def as_array(value: Any, name: str) -> Any:
    """Convert tensors, Series and frames to NumPy arrays; return other values unchanged."""
    if isinstance(value, Tensor):
        if value.layout != torch.strided:
            raise TypeError(f"{name} must be dense. Got a sparse tensor. Use {name}.to_dense().")
        return value.detach().cpu().numpy() if value.dtype != torch.bfloat16 else value.detach().float().cpu().numpy()
    if hasattr(value, "to_numpy"):
        return value.to_numpy()
    return value
