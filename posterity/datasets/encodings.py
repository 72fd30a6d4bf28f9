"""Encodings of columns as inputs and targets: fitted to training rows, stored with the run."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from posterity.datasets import dates
from posterity.datasets.columns import Column, has_leading_zeros
from posterity.datasets.dataset import Task
from posterity.datasets.kinds import Kind, boolean_words, class_names, classes_by_meaning
from posterity.errors import BadData, shown

FEWEST_IDS = 10
"""Fewest rows from which distinct whole numbers are noted to look like row numbers."""

FURTHEST = 1e12
"""Standard deviations from the mean beyond which a value is refused: variances of outputs would overflow in float32."""

_IF_SET = {"stored": "if set"}  # folders of earlier releases do not have these fields


@dataclass(frozen=True)
class InputColumn:
    """The encoding of a column as inputs.

    Numbers, and booleans as 0 and 1 (`categories` holds their two words as first written), give
    (value - `mean`) / `scale`; `fill`, the median of the training rows, replaces missing values. Categories are
    one-hot; a category that no training row has gives zeros only. With `has_indicator`, set where the training rows
    had missing values, one more input is 1 where the value is missing.

    A column of dates has an encoding for each `part`, such as its months as categories; `order` says whether its days
    or its months come first, where the training rows told. `sign` is the percent or currency sign of all fields.
    """

    name: str
    kind: Literal["number", "boolean", "category"]
    mean: float = 0.0
    scale: float = 1.0
    fill: float = 0.0
    categories: tuple[str, ...] = ()
    has_indicator: bool = False
    part: str = field(default="", metadata=_IF_SET)
    order: str = field(default="", metadata=_IF_SET)
    sign: str = field(default="", metadata=_IF_SET)

    def check(self) -> None:
        """Raise a ValueError unless the values make sense together, as they may not when they come from a file."""
        _check_encoding(self.name, self.mean, self.scale, self.fill, self.categories)
        if len(self.categories) != {"number": 0, "boolean": 2}.get(self.kind, len(self.categories) or 1):
            raise ValueError(f"Column {shown(self.name)} is a {self.kind}, and cannot have {shown(self.categories)}.")
        if self.part not in ("", *dates.PARTS) or self.order not in ("", *dates.ORDERS):
            raise ValueError(f"Column {shown(self.name)} cannot have the part {shown((self.part, self.order))}.")

    @property
    def label(self) -> str:
        """The name of the column, with the part of a date."""
        return f"{self.name} {self.part}" if self.part else self.name

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the inputs.

        >>> InputColumn("size", "category", categories=("L", "S"), has_indicator=True).features
        ('size=L', 'size=S', 'size missing')
        """
        values = tuple(f"{self.label}={value}" for value in self.categories)
        return (values if self.kind == "category" else (self.label,)) + (f"{self.name} missing",) * self.has_indicator

    def encode(self, column: Column, decimal: str, notes: list[str]) -> Any:
        """Return the inputs (N, width) of a column in float32; notes what the training rows did not have."""
        if self.part:
            column = part_of(column, self.part, self.order)
        elif self.kind == "number" and self.sign != column.sign:
            _refuse_sign(column, self.sign, decimal)
        missing = column.missing
        if self.kind == "category":
            values = self._one_hot(column, notes)
        else:
            numbers = column.truths(self.categories) if self.kind == "boolean" else column.numbers(decimal)
            values = standardised(column, numbers, self.mean, self.scale, self.fill)
        if self.has_indicator:
            return np.concatenate((values, missing[:, None].astype(np.float32)), axis=1)
        if missing.any() and self.part in ("", "days"):
            stands_in = "no category is set" if self.kind == "category" else f"the median {self.fill:g} stands in"
            notes.append(
                f"Column {shown(self.label)}: {missing.sum()} of {len(missing)} values are missing, as none was in "
                f"the training rows; {stands_in} for them."
            )
        return values

    def _one_hot(self, column: Column, notes: list[str]) -> Any:
        slots = {category: slot for slot, category in enumerate(self.categories)}
        known = np.array([*(slots.get(word, -1) for word in column.words), -2])[column.codes]  # (N,)
        unseen = int((known == -1).sum())
        if unseen:
            others = sorted(word for word in column.words if word not in slots)
            named = ", ".join(map(shown, others[:5])) + ", ..." * (len(others) > 5)
            notes.append(
                f"Column {shown(self.label)}: {unseen} of {len(column)} values are categories that no "
                f"training row has ({named}); no category is set for them."
            )
        return (known[:, None] == np.arange(len(slots))).astype(np.float32)  # (N, C)


@dataclass(frozen=True)
class TargetColumn:
    """The encoding of the target: (value - `mean`) / `scale` in regression, else the index among `classes`.

    With `log` the value is the logarithm of what the file has. `classes` are labels as the training file writes them. A
    label of another file that is written otherwise is taken as the class of the same number, or of the same word of a
    boolean column in another case, where there is just one. `sign` is the percent or currency sign of all fields.
    """

    name: str
    kind: Literal["number", "boolean", "category"]
    mean: float = 0.0
    scale: float = 1.0
    classes: tuple[str, ...] = ()
    log: bool = False
    sign: str = field(default="", metadata=_IF_SET)

    def check(self) -> None:
        """Raise a ValueError unless the values make sense together; see `InputColumn.check`."""
        _check_encoding(self.name, self.mean, self.scale, 0.0, self.classes)
        if len(self.classes) == 1:
            raise ValueError(f"The target {shown(self.name)} must have two classes or more. Got {shown(self.classes)}.")

    def encode(self, column: Column, decimal: str, notes: list[str]) -> Tensor:
        """Return the targets of a column without missing values: (N, 1) float32, or (N,) int64 class indices."""
        if not self.classes:
            if self.sign != column.sign:
                _refuse_sign(column, self.sign, decimal)
            values = column.numbers(decimal)
            values = _logarithms(column, values) if self.log else values
            return torch.from_numpy(standardised(column, values, self.mean, self.scale))
        slots = {label: slot for slot, label in enumerate(self.classes)}
        other = {label: self._other_spelling(label, decimal) for label in column.words if label not in slots}
        row = column.first(label for label, known in other.items() if known is None)
        if row is not None:
            raise BadData(
                f"{column.at(row)}: {shown(column.words[column.codes[row]])} is not a class of the training rows, "
                f"which are {shown(self.classes)}. Correct it, or fit with rows of every class."
            )
        if other:
            named = ", ".join(f"{shown(label)} for {shown(known)}" for label, known in sorted(other.items())[:5])
            notes.append(
                f"The target {shown(self.name)} has labels that are written otherwise than in the training rows "
                f"({named}{', ...' * (len(other) > 5)}); they are taken as the same classes."
            )
        slots.update({label: slots[known] for label, known in other.items() if known is not None})
        return torch.from_numpy(np.array([slots[word] for word in column.words], dtype=np.int64)[column.codes])

    def _other_spelling(self, label: str, decimal: str) -> str | None:
        """Return the only class that a label means in another spelling; None where there is none."""
        if self.kind == "category":
            return None
        (meaning,) = classes_by_meaning((label,), self.kind, (decimal,))
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


def _refuse_sign(column: Column, wanted: str, decimal: str) -> None:
    if not column.sign:
        column.numbers(decimal)  # raises where some fields have a sign and others do not
    raise BadData(
        f"{column.path}: column {shown(column.name)} has {shown(column.sign) if column.sign else 'no sign'} with its "
        f"numbers, where the training rows have {shown(wanted) if wanted else 'none'}. Write them alike."
    )


def part_of(column: Column, part: str, order: str) -> Column:
    """Return a part of a column of dates as a column: months and weekdays by name, others as numbers."""
    import pyarrow as pa

    values = dates.part(column.times(order), part)
    names = {"month": dates.MONTHS, "weekday": dates.WEEKDAYS}.get(part)
    if names is None:
        return replace(column, values=pa.array(values, from_pandas=True))
    words = [None if math.isnan(value) else names[int(value)] for value in values.tolist()]
    return replace(column, values=pa.array(words, pa.string()))


def fit_input(column: Column, kind: Kind, decimal: str, notes: list[str]) -> tuple[InputColumn, ...]:
    """Fit the encodings of a column to its rows; none, with a note, where they have no values or a single one."""
    if column.missing.all():
        notes.append(f"Column {shown(column.name)} has no values and was dropped.")
        return ()
    if kind == "date":
        return _fit_date(column, notes)
    encoding = None
    if kind == "category":
        encoding = _fit_category(column, notes)
    elif kind in ("number", "boolean"):
        encoding = _fit_numbers(column, kind, decimal, notes)
    if encoding is None:
        notes.append(f"Column {shown(column.name)} is constant and was dropped.")
        return ()
    return (encoding,)


def fit_target(column: Column, kind: Kind, task: Task, decimal: str, log: bool) -> TargetColumn:
    """Fit the encoding of the target, or of its logarithm, to its rows; raises BadData where they are all the same."""
    assert kind in ("number", "boolean", "category")
    if task == "classification":
        classes = class_names(column, kind, decimal)
        if len(classes) > 1:
            return TargetColumn(column.name, kind, classes=classes)
    else:
        values = column.numbers(decimal)
        mean, scale = _moments(_logarithms(column, values) if log else values)
        if scale > 0:
            return TargetColumn(column.name, kind, mean, scale, log=log, sign=column.sign)
    raise BadData(
        f"{column.path}: the target {shown(column.name)} is the same in all training rows. There is nothing to learn."
    )


def _logarithms(column: Column, values: Any) -> Any:
    """Take the logarithm of each value; raises BadData at one that has none."""
    if len(rows := np.flatnonzero(values <= 0)):
        raise BadData(
            f"{column.at(rows[0])}: {shown(column.fields[rows[0]])} has no logarithm: --log-target needs targets "
            "above 0. Leave --log-target out, or the row."
        )
    return np.array([math.log(value) for value in values.tolist()])  # numpy's logarithm may differ in the last bit


def standardised(column: Column, values: Any, mean: float, scale: float, fill: float = math.nan) -> Any:
    """Return (value - mean) / scale (N, 1) in float32, with `fill` for nan; raises BadData beyond `FURTHEST`."""
    filled = values if math.isnan(fill) else np.where(np.isnan(values), fill, values)
    with np.errstate(over="ignore"):
        result = ((filled - mean) / scale).astype(np.float32)
    beyond = np.flatnonzero(~(np.abs(result) <= FURTHEST))
    if len(beyond):
        row = int(beyond[0])
        raise BadData(
            f"{column.at(row)}: {shown(column.fields[row])} is too far from the training rows, whose mean is {mean:g} "
            f"and standard deviation {scale:g}. Correct it, or leave the row out."
        )
    return result[:, None]


def _fit_date(column: Column, notes: list[str]) -> tuple[InputColumn, ...]:
    """Fit an encoding to each part of a date that differs between the rows."""
    present, missing = column.rows(np.flatnonzero(~column.missing)), int(column.missing.sum())
    order = "" if column.is_date else column.order or dates.find_order(column.words)
    fitted = []
    for part in dates.PARTS:
        own = part_of(present, part, order)
        named = part in ("month", "weekday")
        encoding = _fit_category(own, []) if named else _fit_numbers(own, "number", ".", [])
        if encoding is not None:
            fitted.append(replace(encoding, part=part, order=order, has_indicator=missing > 0 and part == "days"))
    if not fitted:
        notes.append(f"Column {shown(column.name)} is constant and was dropped.")
        return ()
    parts = ", ".join(encoding.part for encoding in fitted)
    rest = f"; {missing} of {len(column)} are missing, and one more input says where" if missing else ""
    notes.append(f"Column {shown(column.name)} has dates: inputs are its {parts}{rest}.")
    return tuple(fitted)


def _fit_category(column: Column, notes: list[str]) -> InputColumn | None:
    categories, missing = tuple(sorted(column.words)), int(column.missing.sum())
    if len(categories) + bool(missing) < 2:
        return None
    own = f", and the missing values ({missing} of {len(column)}) as one more" if missing else ""
    count = f"{len(categories)} categor{'ies' if len(categories) > 1 else 'y'}"
    notes.append(f"Column {shown(column.name)} is taken as {count}{own}.")
    return InputColumn(column.name, "category", categories=categories, has_indicator=missing > 0)


def _fit_numbers(
    column: Column, kind: Literal["number", "boolean"], decimal: str, notes: list[str]
) -> InputColumn | None:
    words = boolean_words(column) if kind == "boolean" else ()
    values = column.truths(words) if words else column.numbers(decimal)
    known = values[~column.missing]
    mean, scale = _moments(known)
    if scale == 0:
        return None
    name, count = shown(column.name), len(values)
    missing, middle = count - len(known), (len(known) - 1) // 2
    fill = float(np.partition(known, middle)[middle])
    if missing:
        notes.append(
            f"Column {name}: {missing} of {count} values are missing; the median {fill:g} stands in for them, "
            "and one more input says where."
        )
    whole = known == np.floor(known)
    if whole.any() and (zeros := has_leading_zeros(column)):
        notes.append(
            f"Column {name} has whole numbers with zeros in front, as {zeros}. If they are codes, "
            f"use {column.option('category')}."
        )
    if kind == "number" and count >= FEWEST_IDS and not missing and whole.all() and len(np.unique(known)) == count:
        notes.append(
            f"Column {name} has another whole number in every row and is an input. If it only numbers the rows, "
            f"use {column.option('drop')}."
        )
    return InputColumn(column.name, kind, mean, scale, fill, words, missing > 0, sign=column.sign)


def _moments(values: Any) -> tuple[float, float]:
    """Return mean and population standard deviation, which is 0 where the values do not differ in float64."""
    if values.min() == values.max():
        return float(values[0]), 0.0
    unit = 2.0 ** (math.frexp(np.abs(values).max())[1] - 1)  # squares of large numbers would overflow
    scaled = values / unit
    mean = _sum(scaled) / len(scaled)
    variance = _sum((scaled - mean) ** 2) / len(scaled)
    return mean * unit, math.sqrt(variance) * unit


def _sum(values: Any, width: int = 4096) -> float:
    """Return the sum to the last bit, as `math.fsum`; of many values in parallel, with the error of each addition.

    Reference: Knuth, The Art of Computer Programming, volume 2, section 4.2.2, theorem B.
    """
    whole, lost = len(values) // width * width, False
    totals = [np.zeros(width if whole else 0)] * 3
    for rest in values[:whole].reshape(-1, width):
        for place, total in enumerate(totals):
            totals[place] = added = total + rest
            part = added - total
            rest = (total - (added - part)) + (rest - part)
        lost = lost or rest.any()
    return math.fsum((values if lost else np.concatenate((*totals, values[whole:]))).data)
