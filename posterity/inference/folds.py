"""Folds of rows: which to train on and which to score, in cross-validation."""

from datetime import UTC, date, datetime
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from posterity.errors import BadData, shown
from posterity.numerics.random import Key


class Fold(NamedTuple):
    """Rows to train on and rows to score: two sorted int64 tensors on the CPU."""

    train: Tensor
    test: Tensor


def folds(
    count: int, num_folds: int = 5, *, labels: Any = None, groups: Any = None, times: Any = None, seed: int = 0
) -> tuple[Fold, ...]:
    """Split `count` rows into folds at random, by group, or in time order.

    Takes for each row, (N,), its class in `labels`, its group in `groups` (numbers or strings), its time in `times`
    (numbers or datetimes). Groups and times exclude each other.

    - At random: every row is scored once. The folds, and with `labels` the rows of each class in them, differ in size
      by one at most.
    - With `groups` no group is in two folds, nor both trained on and scored. Groups go one at a time, the largest
      first, to the fold that they balance best: in rows, or with `labels` in the rows of each class.
    - With `times` the window expands: rows in order are cut into `num_folds` + 1 blocks, and fold k trains on the first
      k blocks and scores the next. Rows of one time stay together. The first block is never scored; `labels` and
      `seed` do not matter.

    Folds depend on the arguments alone: same seed, same bits on any machine. `num_folds=count` leaves one row out at a
    time.

    **Limit**: a class of a single row is missing from the training rows of one fold.

    **References**: Kohavi (1995), for stratified folds; Hyndman and Athanasopoulos (2021), Forecasting, section 5.10,
    for the expanding window.

    >>> [fold.test.tolist() for fold in folds(4, 2, groups=["a", "b", "a", "b"])]
    [[1, 3], [0, 2]]
    >>> [(fold.train.tolist(), fold.test.tolist()) for fold in folds(4, 3, times=[3.0, 1.0, 4.0, 2.0])]
    [([1], [3]), ([1, 3], [0]), ([0, 1, 3], [2])]
    """
    _check_counts(count, num_folds)
    classes = _numbered("labels", labels, count)[0]
    key = Key(seed).fold("folds")
    if times is not None:
        if groups is not None:
            raise ValueError("folds: groups and times cannot be given together. Leave one of them out.")
        return _in_time_order(times, count, num_folds)
    if groups is None:
        fold = _dealt(classes, num_folds, key)
    else:
        fold = _by_group(*_numbered("groups", groups, count), classes, num_folds, key)
    everything = torch.arange(count, device="cpu")
    return tuple(Fold(everything[fold != number], everything[fold == number]) for number in range(num_folds))


def _check_counts(count: int, num_folds: int) -> None:
    if isinstance(num_folds, bool) or not isinstance(num_folds, int) or num_folds < 2:
        raise ValueError(f"folds: num_folds must be an integer from 2 up. Got {shown(num_folds)}.")
    if count < num_folds:
        raise BadData(f"folds: {num_folds} folds need at least {num_folds} rows. Got {count}. Ask for fewer folds.")


def _values(name: str, given: Any, count: int) -> np.ndarray[Any, Any]:
    """One value for each row; BadData where there are more or fewer, or some are missing."""
    values = np.asarray(given.detach().cpu() if isinstance(given, Tensor) else given)
    if values.ndim == 2 and values.shape[1] == 1:
        values = values[:, 0]
    if values.shape != (count,):
        raise BadData(f"folds: {name} must have one value for each of the {count} rows. Got {values.shape}.")
    if values.dtype == object:
        missing = np.array([value is None or value != value for value in values])
        dates = all(isinstance(value, date) for value in values)
        if not missing.any():
            values = np.array([_naive(value) if dates else str(value) for value in values], "M8[us]" if dates else None)
    else:
        missing = values != values  # NaN, NaT
    if missing.any():
        row = int(np.flatnonzero(missing)[0])
        raise BadData(f"folds: {name} must not be missing. Got none in row {row}. Drop such rows, or fill them.")
    return values


def _naive(value: date) -> date:
    """A date, or a time in UTC without its zone."""
    zoned = isinstance(value, datetime) and value.tzinfo is not None
    return value.astimezone(UTC).replace(tzinfo=None) if zoned else value  # type: ignore[attr-defined]


def _numbered(name: str, given: Any, count: int) -> tuple[Tensor, int]:
    """Values as numbers 0, 1, ... in sorted order, and how many differ; all 0 where none are given."""
    if given is None:
        return torch.zeros(count, dtype=torch.int64, device="cpu"), 1
    distinct, numbers = np.unique(_values(name, given, count), return_inverse=True)
    return torch.from_numpy(numbers.astype(np.int64)), len(distinct)


def _dealt(classes: Tensor, num_folds: int, key: Key) -> Tensor:
    """Deal rows out in turn, class after class, each in random order; return the fold of each row, (N,)."""
    shuffled = key.permutation(len(classes), "cpu")
    order = shuffled[classes[shuffled].argsort(stable=True)]
    fold = torch.empty_like(classes)
    fold[order] = torch.arange(len(classes), device="cpu") % num_folds
    return fold


def _by_group(groups: Tensor, count: int, classes: Tensor, num_folds: int, key: Key) -> Tensor:
    """Give each group to a fold, so that the folds hold like shares of each class; return the fold of each row, (N,).

    A group goes where the sum of the squared shares (rows of a class in the fold / rows of the class) grows least.
    """
    if count < num_folds:
        raise BadData(f"folds: {num_folds} folds need at least {num_folds} groups. Got {count}. Ask for fewer folds.")
    kinds = int(classes.max()) + 1
    held = np.bincount((groups * kinds + classes).numpy(), minlength=count * kinds).reshape(count, kinds)
    shares = held / held.sum(0)  # (groups, classes)
    shuffled = key.permutation(count, "cpu").numpy()
    order = shuffled[np.argsort(-held.sum(1)[shuffled], kind="stable")]
    filled, fold_of = np.zeros((num_folds, kinds)), np.empty(count, dtype=np.int64)
    empty = num_folds
    for left, group in zip(range(count, 0, -1), order, strict=True):
        growth = filled @ shares[group]  # half of the growth, up to what all folds have in common
        if left <= empty:
            growth = np.where(filled.any(1), np.inf, growth)  # the last groups fill the empty folds
        fold = int(np.argmin(growth))
        empty -= not filled[fold].any()
        filled[fold] += shares[group]
        fold_of[group] = fold
    return torch.from_numpy(fold_of)[groups]


def _in_time_order(given: Any, count: int, num_folds: int) -> tuple[Fold, ...]:
    values = _values("times", given, count)
    if values.dtype.kind not in "iufmMb":
        raise BadData(
            f"folds: times must be numbers or datetimes. Got {shown(values[0])}. Convert them, as by to_datetime."
        )
    distinct, numbers = np.unique(values, return_inverse=True)
    if len(distinct) <= num_folds:
        raise BadData(
            f"folds: {num_folds} folds in time order need at least {num_folds + 1} times. Got {len(distinct)}. "
            "Ask for fewer folds."
        )
    upto = np.cumsum(np.bincount(numbers))  # rows up to each time
    ends: list[int] = []  # number of times before the end of each block
    for block in range(num_folds):
        near = int(np.argmin(np.abs(upto - count * (block + 1) / (num_folds + 1)))) + 1
        least = ends[-1] + 1 if ends else 1
        ends.append(min(max(near, least), len(distinct) - (num_folds - block)))
    block_of = torch.from_numpy(np.searchsorted(np.array(ends), numbers, side="right").astype(np.int64))
    everything = torch.arange(count, device="cpu")
    return tuple(Fold(everything[block_of < k], everything[block_of == k]) for k in range(1, num_folds + 1))
