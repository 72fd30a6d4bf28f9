"""Permutation importance of the columns of a file, or of single inputs."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from posterity.datasets import Preprocessing
from posterity.metrics import permutation_importance
from posterity.predictive import Predictive


def column_importance(
    predict: Callable[[Tensor], Predictive], fitted: Preprocessing | None, inputs: Tensor, targets: Tensor
) -> list[dict[str, Any]]:
    """Return the rise of the NLL when a column of the file, or an input, is permuted; the largest first."""
    names, features = columns_of(fitted, inputs.shape[1])
    result = permutation_importance(predict, inputs, targets, features=features)
    rows = zip(names, result.rise.tolist(), result.error.tolist(), strict=True)
    return sorted(
        ({"column": name, "nll_rise": rise, "standard_error": error} for name, rise, error in rows),
        key=lambda row: -row["nll_rise"],
    )


def columns_of(fitted: Preprocessing | None, count: int) -> tuple[list[str], list[list[int]] | None]:
    """Return the names of columns and the indices of the inputs of each; x1, x2, ... and None without a file."""
    if fitted is None:
        return [f"x{index}" for index in range(1, count + 1)], None
    ends, features = 0, dict[str, list[int]]()
    for column in fitted.inputs:
        features.setdefault(column.name, []).extend(range(ends, ends + len(column.features)))
        ends += len(column.features)
    return [*features], [*features.values()]
