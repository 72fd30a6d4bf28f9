"""Names and order of the classes in a target column."""

from collections.abc import Iterable

from posterity.datasets.columns import Column, Kind
from posterity.datasets.fields import LARGEST_WHOLE, MISSING


def class_labels(column: Column, kind: Kind, decimal: str) -> list[str | None]:
    """The name of the class of each row of a target, one for all ways to write it; None where it is missing.

    `1`, `1.0` and `01` are one class, and so are `yes` and `Yes` where the target is boolean.
    """
    if kind == "number":
        return [None if value is None else _number_name(value) for value in column.numbers(decimal)]
    fields = [None if field in MISSING else field for field in column.fields]
    return [field and field.casefold() for field in fields] if kind == "boolean" else fields


def class_names(labels: Iterable[str | None], kind: Kind) -> tuple[str, ...]:
    """The different labels in order: numbers by size, truth values false first, text by its letters."""
    present = {label for label in labels if label is not None}
    return tuple(sorted(present, key=float)) if kind == "number" else tuple(sorted(present))


def _number_name(value: float) -> str:
    return str(int(value)) if value.is_integer() and abs(value) < LARGEST_WHOLE else repr(value)
