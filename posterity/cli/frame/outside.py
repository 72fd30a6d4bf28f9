"""Detection of rows outside the training data, column by column, with the name of the farthest column."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from posterity.cli.frame.sources import Source
from posterity.datasets import Preprocessing
from posterity.errors import BadFolder
from posterity.storage import Part
from posterity.storage.schema import AGAIN, check_names, check_tensor, reading

SHARE = 0.01
"""The share of training rows that may be flagged, each judged by the others."""


def numeric_features(preprocessing: Preprocessing | None, count: int) -> Tensor:
    """Return a mask (D,) of the inputs that are numbers; categories, booleans and indicators have no range."""
    if preprocessing is None:
        return torch.ones(count, dtype=torch.bool, device="cpu")
    return torch.tensor(
        [
            column.kind == "number" and name == column.label
            for column in preprocessing.inputs
            for name in column.features
        ],
        device="cpu",
    )


def reach(source: Source) -> dict[str, Tensor]:
    """Return the range and standard deviation of each input over the training rows, and the margin beyond the range.

    A row is outside where a number lies beyond the range by more than the margin, in standard deviations. The margin is
    the least for which at most 1 % of the training rows would be outside, each judged by the range and standard
    deviation of the others: only the largest and the least value of a column can be. For exchangeable rows about as
    many new rows are flagged; of fewer than 199 training rows none would be.
    """
    inputs = source.data.train.inputs.double().cpu()
    numeric, count = numeric_features(source.preprocessing, inputs.shape[1]), len(inputs)
    mean = inputs.mean(0)
    squares = (inputs - mean).square().sum(0)
    excess = torch.zeros(count, dtype=torch.float64, device="cpu")
    for largest in (True, False) if count > 2 else ():
        values, rows = inputs.topk(2, dim=0, largest=largest)
        rest = (squares - count / (count - 1) * (values[0] - mean).square()).clamp_min(0.0)  # without that row
        gaps = (values[0] - values[1]).abs() / (rest / (count - 1)).sqrt()
        excess.scatter_reduce_(0, rows[0][numeric], gaps.nan_to_num(0.0, posinf=0.0)[numeric], "amax")
    spread = (squares / count).sqrt()
    spread = torch.where(spread > 0, spread, 1.0)
    rank = min(count, math.ceil((1 - SHARE) * (count + 1)))
    return {"low": inputs.amin(0), "high": inputs.amax(0), "spread": spread, "margin": excess.sort().values[rank - 1]}


def stored_reach(part: Part, run: Path, inputs: int) -> Part | None:
    """Check the stored result of `reach` for `inputs` inputs; return None if an earlier release stored it otherwise."""
    shapes: dict[str, tuple[int, ...]] = {"low": (inputs,), "high": (inputs,), "spread": (inputs,), "margin": ()}
    with reading(f"Run folder '{run}': part 'reach'"):
        if part.older and not shapes.keys() <= part.tensors.keys():
            return None
        check_names("It", list(part.config), [])
        check_names("It", sorted(part.tensors), sorted(shapes))
        for name, shape in shapes.items():
            check_tensor(f"The tensor {name!r}", part.tensors[name], shape, torch.float64)
        low, high, spread, margin = (part.tensors[name] for name in shapes)
        if not bool((low <= high).all() and (spread > 0).all() and margin >= 0):
            raise BadFolder(f"Its ranges, spreads and margin must not be negative. {AGAIN}")
    return part


def distances(part: Part | None, source: Source) -> Tensor | None:
    """Return the distance of each test row from the training rows, (N,); above 1 it is outside. None for old runs.

    It is the largest |x - middle| / (half the range + the margin) over the numbers of the row. About 1 % of rows like
    the training rows exceed 1. Categories and missing values have no distance.
    """
    if part is None:
        return None
    inputs, known = source.data.test.inputs.double().cpu(), part.tensors
    numeric = numeric_features(source.preprocessing, inputs.shape[1])
    reached = 0.5 * (known["high"] - known["low"]) + known["margin"] * known["spread"]
    away = (inputs - 0.5 * (known["high"] + known["low"])).abs()
    return torch.where(numeric & (away > 0), away / reached, 0.0).amax(1) if numeric.any() else None


def outside(part: Part | None, source: Source) -> list[str] | None:
    """Return for each test row the column farthest outside the training rows, or "". None for old runs.

    Numbers are judged by `reach`. A category that no training row has is outside, and so is a missing value in a column
    that had none.
    """
    if part is None:
        return None
    inputs = source.data.test.inputs.double().cpu().numpy()
    low, high, spread, margin = (part.tensors[name].numpy() for name in ("low", "high", "spread", "margin"))
    beyond = np.maximum(np.maximum(low - inputs, inputs - high), 0.0) / spread
    beyond = np.where(numeric_features(source.preprocessing, inputs.shape[1]).numpy(), beyond - margin, 0.0)
    if source.preprocessing is None:
        names = [f"x{index}" for index in range(1, inputs.shape[1] + 1)]
    else:
        names, beyond = _by_column(source.preprocessing, source, inputs, beyond)
    worst, column = beyond.max(1).tolist(), beyond.argmax(1).tolist()
    return [names[index] if far > 0 else "" for far, index in zip(worst, column, strict=True)]


def _by_column(fitted: Preprocessing, source: Source, inputs: Any, beyond: Any) -> tuple[list[str], Any]:
    """Return the names of the encoded columns, and how far each row is outside in each (inf: unseen in training)."""
    assert source.table is not None
    marked = {column.name for column in fitted.inputs if column.has_indicator}
    rows: dict[str, Any] = {name: source.table.column(name) for name in {column.name for column in fitted.inputs}}
    test = np.array(source.test, dtype=np.int64)
    far, start = np.empty((len(inputs), len(fitted.inputs))), 0
    for index, column in enumerate(fitted.inputs):
        width = len(column.features)
        missing = rows[column.name].missing[test]
        own = beyond[:, start : start + width].max(1)
        if column.kind == "category":
            seen = inputs[:, start : start + len(column.categories)].any(1)
            own[~seen & ~missing] = np.inf
        if column.name not in marked:
            own[missing] = np.inf
        far[:, index] = own
        start += width
    return [column.name for column in fitted.inputs], far
