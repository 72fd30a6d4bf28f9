"""Columns of frames and arrays as Arrow arrays of few types: pandas, polars, Arrow, NumPy and torch."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from posterity.datasets.arrow import compute
from posterity.errors import BadData, shown


class Frame(NamedTuple):
    """The columns of a frame by name, whether the frame names them, and the names of categorical ones."""

    columns: dict[str, Any]
    named: bool
    categories: frozenset[str]


def frame_of(data: Any, path: Path, names: Sequence[str] | None = None, letter: str = "x") -> Frame:
    """Return the columns of a DataFrame, Arrow table, 2-D array or tensor as Arrow arrays; `names` replace its own.

    Columns without names are called x1, x2, ..., with another `letter` if it is given. Raises BadData for values that
    are no numbers, booleans, strings or dates.
    """
    import pyarrow as pa

    if hasattr(data, "iloc"):  # pandas, whose columns of objects may hold anything
        frame = data if data.ndim == 2 else data.to_frame()
        own, arrays = list(frame.columns), [array_of(frame.iloc[:, place]) for place in range(frame.shape[1])]
    elif hasattr(data, "__arrow_c_stream__"):
        table = pa.table(data if hasattr(data, "columns") else data.to_frame())  # a polars Series is one column
        own, arrays = table.column_names, table.columns
    else:
        matrix = _matrix(data)
        own, arrays = [None] * matrix.shape[1], [array_of(column) for column in matrix.T]
    if names is not None and len(names) != len(own):
        raise BadData(f"{path}: {len(names)} names were given for {len(own)} columns. Give one for each.")
    return framed(own if names is None else list(names), arrays, path, letter)


def framed(names: list[Any], arrays: list[Any], path: Path, letter: str = "x") -> Frame:
    """Return Arrow arrays as the columns of a frame; where not all names are strings, it has no names."""
    import pyarrow as pa

    named = bool(names) and all(isinstance(name, str) for name in names)
    if not named:
        names = [f"{letter}{place}" for place in range(1, len(names) + 1)]
    columns: dict[str, Any] = {}
    for name, array in zip(names, arrays, strict=True):
        if name in columns:
            raise BadData(f"{path}: two columns have the same name {shown(name)}. Give every column its own.")
        columns[name] = _typed(array, path, name)
    categorical = (name for name, array in zip(names, arrays, strict=True) if pa.types.is_dictionary(array.type))
    return Frame(columns, named, frozenset(categorical))


def _matrix(data: Any) -> Any:
    if isinstance(data, Tensor):
        data = data.detach().cpu()
        data = (data.float() if data.dtype in (torch.bfloat16, torch.float16) else data).numpy()
    matrix = np.asarray(data)
    if matrix.ndim == 1:
        matrix = matrix[:, None]
    if matrix.ndim != 2:
        raise ValueError(f"as_table: an array must have rows and columns. Got the shape {matrix.shape}.")
    return matrix


def array_of(values: Any) -> Any:
    """Return a column as an Arrow array; of values of several types, each as text."""
    import pyarrow as pa

    try:
        return pa.array(values, from_pandas=True)
    except (pa.ArrowException, OverflowError):
        return pa.array([None if _is_missing(value) else str(value) for value in values], pa.string())


def _is_missing(value: Any) -> bool:
    """Return whether a value of an object is None, NaN, NaT or pd.NA."""
    return (
        value is None or type(value).__name__ in ("NAType", "NaTType") or (isinstance(value, float) and value != value)
    )


def _typed(array: Any, path: Path, name: str) -> Any:
    """Return an Arrow array as strings, booleans, int64, float64 or timestamps without a zone; nan becomes null."""
    import pyarrow as pa

    pc = compute()
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    if pa.types.is_dictionary(array.type):
        words = array.dictionary  # of polars its strings are views, which Arrow cannot take from
        array = (words.cast(pa.string()) if "string" in str(words.type) else words).take(array.indices)
    kind = array.type
    if pa.types.is_null(kind) or "string" in str(kind):
        return array.cast(pa.string())
    if pa.types.is_boolean(kind) or kind == pa.int64():
        return array
    if pa.types.is_integer(kind):
        return array.cast(pa.int64()) if kind != pa.uint64() else array
    if pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        array = array.cast(pa.float64())
        return pc.if_else(pc.is_nan(array), pa.scalar(None, pa.float64()), array)
    if pa.types.is_timestamp(kind):
        return (pc.local_timestamp(array) if kind.tz else array).cast(pa.timestamp("us"), safe=False)
    if pa.types.is_date(kind):
        return array.cast(pa.timestamp("us"))
    raise BadData(
        f"{path}: column {shown(name)} has values of type {kind}, which cannot be used. Turn them into numbers, "
        f"strings or dates, or leave the column out (drop=[{shown(name)}])."
    )
