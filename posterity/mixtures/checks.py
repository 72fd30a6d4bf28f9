"""Checks of rows, weights, labels and settings of mixtures, and their conversion to tensors."""

import math
import numbers
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from posterity.datasets.shards import Shards
from posterity.errors import BadData, shown, whole
from posterity.mixtures.sweeps import Rows, StoredPoints
from posterity.model.batch import as_tensor
from posterity.numerics.random import Key

NAMED = 5  # the largest number of bad rows in a message
LARGEST = {torch.float32: 1e30, torch.float64: 1e140}  # sums of such numbers, and in float64 of squares, are finite
HEAVIEST = 1e20  # the largest sum of row weights at which weighted sums of squares are finite


def as_points(value: object, name: str = "X", expected: tuple[str, int] | None = None) -> Tensor:
    """Convert rows (N, D) to a float32 or float64 tensor, which shares memory where it can.

    Takes lists, arrays and data frames of numbers; integers become float64. `expected` is the class and the D of a
    fitted mixture.
    """
    points = _numbers(value, name)
    shape = tuple(points.shape)
    if len(shape) != 2:
        hint = f"Reshape your data: {name}.reshape(-1, 1) is one column." if len(shape) == 1 else "Reshape your data."
        raise BadData(f"{name} must have rows and columns, (N, D). Got shape {shape}. {hint}")
    for count, word in zip(shape, ("sample", "feature"), strict=True):
        if not count:
            raise BadData(f"{name} has 0 {word}(s) (shape={shape}) while a minimum of 1 is required.")
    if expected is not None and shape[1] != expected[1]:
        owner, count = expected
        raise BadData(f"{name} has {shape[1]} features, but {owner} is expecting {count} features as input, as in fit.")
    if not points.is_floating_point():
        points = points.double()
    elif points.dtype not in (torch.float32, torch.float64):
        points = points.float()
    low, high = torch.aminmax(points)
    largest = LARGEST[points.dtype]
    if not bool((low >= -largest) & (high <= largest)):
        bad = ~torch.isfinite(points).all(1)
        if bool(bad.any()):
            raise BadData(f"{name} must be finite. Got NaN or infinity in {_rows(bad)}. Drop or impute them.")
        bad = (points.abs() > largest).any(1)
        raise BadData(f"{name} must lie within {largest:g} of 0. Got larger numbers in {_rows(bad)}. Rescale it.")
    return points


def as_rows(
    X: object, sample_weight: object, labels: object, components: int, expected: tuple[str, int] | None = None
) -> Rows:
    """Make rows with weights and labels, centred at their weighted mean; `Shards` are read once for it."""
    if isinstance(X, Shards):
        return _as_stored_rows(X, sample_weight, labels, components, expected)
    points = as_points(X, expected=expected)
    weights = as_row_weights(sample_weight, points)
    if weights is None:
        centre = points.mean(0).to(torch.float64)
    else:  # rounding of the centre has no effect
        centre = ((weights / weights.sum()).to(points.dtype) @ points).to(torch.float64)
    return Rows(points, weights, as_labels(labels, points, components), centre)


def _as_stored_rows(
    X: Shards, sample_weight: object, labels: object, components: int, expected: tuple[str, int] | None
) -> Rows:
    if X.weights is not None:
        raise BadData(
            f"X must be files without a column of weights. Got {shown(X.weights)}. Leave it out of read_shards, and "
            "give sample_weight as an array."
        )
    points = StoredPoints(X)
    weights = as_row_weights(sample_weight, points)
    known, sums = as_labels(labels, points, components), list[Tensor]()
    for start, own in stored_points(X, expected):
        share = own.to(torch.float64)
        sums.append(share.sum(0) if weights is None else weights[start : start + len(own)] @ share)
    centre = torch.stack(sums).sum(0) / (len(points) if weights is None else weights.sum())
    return Rows(points, weights, known, centre)


def stored_points(X: Shards, expected: tuple[str, int] | None) -> Iterator[tuple[int, Tensor]]:
    """Yield the rows of files block by block, checked as `as_points` does, with the number of rows before them."""
    for start, points, *_ in X.blocks():
        yield start, as_points(points, f"X, from row {start} on,", expected)


def as_row_weights(value: object, points: Tensor | StoredPoints) -> Tensor | None:
    """Convert row weights (N,) to float64, at least 0 with a positive sum; None for equal weights."""
    if value is None:
        return None
    weights = _per_row(value, "sample_weight", points).double()
    bad = ~(torch.isfinite(weights) & (weights >= 0))
    if bool(bad.any()):
        raise BadData(f"sample_weight must be finite and at least 0. Got something else in {_rows(bad)}.")
    if not float(weights.sum()) > 0:
        raise BadData("sample_weight must have a positive sum. Got zeros only.")
    if not float(weights.sum()) <= HEAVIEST:
        raise BadData(
            f"sample_weight must have a sum of at most {HEAVIEST:g}. Got {float(weights.sum()):g}. "
            "Divide the weights by their largest."
        )
    return weights


def as_labels(value: object, points: Tensor | StoredPoints, components: int) -> Tensor | None:
    """Convert known components (N,) to int64, -1 where unknown; None where no row has a label."""
    if value is None:
        return None
    labels = _per_row(value, "labels", points)
    if labels.is_floating_point() or labels.dtype == torch.bool:
        raise BadData(f"labels must be whole numbers, -1 where unknown. Got {labels.dtype}. Convert them.")
    labels = labels.long()
    bad = (labels < -1) | (labels >= components)
    if bool(bad.any()):
        raise BadData(
            f"labels must lie between 0 and n_components - 1 = {components - 1}, or be -1 where unknown. "
            f"Got {int(labels[bad][0])} in {_rows(bad)}."
        )
    return labels if bool((labels >= 0).any()) else None


def refuse_few_rows(points: Tensor | StoredPoints, weights: Tensor | None, components: int) -> None:
    """Raise where there are more components than rows of positive weight."""
    count = len(points) if weights is None else int((weights > 0).sum())
    if components > count:
        kind = "rows" if weights is None else "rows of positive weight"
        raise BadData(
            f"X must have at least n_components = {components} {kind}. Got {count}. Ask for fewer components."
        )


def not_negative(name: str, value: object, alternative: str = "") -> float:
    """Return the value as a float; raise a ValueError unless it is finite and at least 0."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0 <= float(value) < math.inf:
        raise ValueError(f"{name} must be a number of at least 0{alternative}. Got {shown(value)}.")
    return float(value)


def one_of(name: str, value: object, known: Iterable[str]) -> None:
    """Raise a ValueError unless `value` is one of the known names."""
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}. Got {shown(value)}.")


def as_key(random_state: object) -> Key:
    """Convert a random_state to a key: an integer, a Key, a numpy generator (an integer is drawn), or None, for 0."""
    if random_state is None:
        return Key(0)
    if isinstance(random_state, Key):
        return random_state
    if isinstance(random_state, np.random.RandomState):
        return Key(int(random_state.randint(2**31 - 1)))
    if isinstance(random_state, np.random.Generator):
        return Key(int(random_state.integers(2**31 - 1)))
    whole("random_state", random_state)
    return Key(int(random_state))  # type: ignore[call-overload]


def as_location(value: object, name: str, shape: tuple[int, ...], like: Tensor | StoredPoints) -> Tensor:
    """Convert a given start in the space of the rows, which must lie within their limits."""
    start, largest = as_start(value, name, shape, like), LARGEST[torch.float64]
    if bool((start.abs() > largest).any()):
        raise ValueError(f"{name} must lie within {largest:g} of 0. Got larger numbers.")
    return start


def as_start(value: object, name: str, shape: tuple[int, ...], like: Tensor | StoredPoints) -> Tensor:
    """Convert a given start to float64 on the device of the rows; it must be finite and of this shape."""
    start = _numbers(value, name).to(like.device, torch.float64)
    if tuple(start.shape) != shape:
        raise ValueError(f"{name} must have shape {shape}. Got {tuple(start.shape)}.")
    if not bool(torch.isfinite(start).all()):
        raise ValueError(f"{name} must be finite. Got NaN or infinity.")
    return start


def as_mixture_weights(value: object, name: str, components: int, like: Tensor | StoredPoints) -> Tensor:
    """Convert weights (K,) of components, which must be at least 0 with sum 1."""
    weights = as_start(value, name, (components,), like)
    if bool((weights < 0).any()) or abs(float(weights.sum()) - 1) > 1e-6:
        raise ValueError(
            f"{name} must be at least 0 and sum to 1. Got {shown(weights)} with sum {float(weights.sum())}."
        )
    return weights


def _numbers(value: object, name: str) -> Tensor:
    """Convert to a tensor of real numbers without a graph, which shares memory where it can."""
    if isinstance(value, Tensor):
        if value.layout != torch.strided:
            raise BadData(f"{name} must be dense. Got a sparse tensor. Use {name}.to_dense().")
        if value.is_complex():
            raise BadData(f"Complex data not supported: {name} must hold real numbers. Got {value.dtype}.")
        return value.detach()
    if hasattr(value, "toarray"):
        raise BadData(f"{name} must be dense. Got a sparse matrix. Use {name}.toarray().")
    if isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value):
        raise BadData(f"{name} must have no masked numbers. Got a masked array. Drop or impute them.")
    if hasattr(value, "columns"):
        frame: Any = value
        array = np.asarray(frame)
        # Columns of different or nullable dtypes make an array of objects; missing numbers become NaN.
        if array.dtype.kind == "O" and all(getattr(dtype, "kind", "O") in "fiub" for dtype in frame.dtypes):
            array = frame.to_numpy(dtype=np.float64, na_value=np.nan)
        value = array
    if isinstance(value, (list, tuple)):
        try:
            value = np.asarray(value)
        except ValueError as error:
            raise BadData(f"{name} must have rows of equal length. Got lists of different lengths.") from error
    if hasattr(value, "__array__"):
        value = np.asarray(value)
        if value.dtype.kind == "c":
            raise BadData(f"Complex data not supported: {name} must hold numbers. Got an array of {value.dtype}.")
        if value.dtype.kind == "O":
            value = _from_objects(value, name)
    return as_tensor(value, name)


def _from_objects(array: Any, name: str) -> Any:
    """Convert an array of objects to float64; strings are refused, whatever they say."""
    if not any(isinstance(entry, (str, bytes)) for entry in array.flat):
        try:
            return array.astype(np.float64)
        except (TypeError, ValueError) as error:
            raise TypeError(f"{name} must hold numbers: {error}.") from error
    return array


def _per_row(value: object, name: str, points: Tensor | StoredPoints) -> Tensor:
    values = _numbers(value, name).to(points.device)
    if tuple(values.shape) != (len(points),):
        raise BadData(f"{name} must have one number for each row, ({len(points)},). Got {tuple(values.shape)}.")
    return values


def _rows(bad: Tensor) -> str:
    """Name the first bad rows in words."""
    indices = bad.nonzero().flatten()
    named = ", ".join(str(int(index)) for index in indices[:NAMED])
    more = f" and {len(indices) - NAMED} more" if len(indices) > NAMED else ""
    return f"row{'s' if len(indices) > 1 else ''} {named}{more}"
