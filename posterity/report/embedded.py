"""Predictions that a page embeds for its scripts: packed as base64, with a limit on rows and bytes.

A page holds predictions in float32 or float64, whichever keeps scores to 1e-6. Intervals of a normal predictive follow
from mean and standard deviation; others come with the ends of their intervals at each of the `LEVELS`.
"""

import base64
import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from posterity.predictive import Predictive
from posterity.storage.part import JSON

LEVELS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 0.98, 0.99)
"""Levels of intervals that the reader of a page can choose."""

MOST_ROWS = 1000
MOST_SEARCHED = 300  # most rows whose intervals are found by a search, which takes seconds
MOST_BYTES = 700_000
GRID = 56  # points along each side of a map
_NUMBER = 16 / 3  # bytes of a float32 in base64


def packed(values: "Tensor | NDArray[Any]", kind: str) -> str:
    """Return values as base64 in a little-endian NumPy dtype, such as "<f4"."""
    array = values.detach().cpu().numpy() if isinstance(values, Tensor) else values
    return base64.b64encode(np.ascontiguousarray(array, dtype=kind).tobytes()).decode("ascii")


def chosen_rows(predictives: Sequence[Predictive]) -> Tensor:
    """Return the indices of the rows whose predictions a page holds, evenly spaced.

    They are at most MOST_ROWS, or MOST_SEARCHED if intervals have no closed form, and take at most MOST_BYTES.
    """
    count = len(predictives[0])
    each = sum(_NUMBER * _numbers(pred) for pred in predictives)
    known = all(pred.classifies or _is_normal(pred) for pred in predictives)
    most = max(1, min(count, MOST_ROWS if known else MOST_SEARCHED, int(MOST_BYTES / each)))
    return torch.linspace(0, count - 1, most, dtype=torch.float64, device="cpu").round().long()


def _numbers(pred: Predictive) -> int:
    """Return how many numbers a page holds for each row."""
    if pred.classifies:
        return pred.probs.shape[1]
    return 5 if _is_normal(pred) else 5 + 2 * len(LEVELS)


def class_numbers(predictives: Mapping[str, Predictive], labels: Tensor) -> dict[str, JSON]:
    """Return labels, and log probabilities of all classes by method."""
    return {
        "labels": packed(labels, "<i4"),
        "methods": {word: {"logs": packed(_log_probs(pred), "<f4")} for word, pred in predictives.items()},
    }


def _log_probs(pred: Predictive) -> Tensor:
    """Return the log probability of each class, (N, C), as scores compute it: finite even where `probs` is 0."""
    label = torch.zeros(len(pred), dtype=torch.int64, device=pred.probs.device)
    return torch.stack([pred.log_prob(label + index).double() for index in range(pred.probs.shape[1])], dim=1)


def number_numbers(
    predictives: Mapping[str, Predictive], targets: Tensor, levels: Sequence[float], *, log: bool
) -> dict[str, JSON]:
    """Return targets (N,), and moments and intervals by method, in units of the page.

    With `log` the predictives are of logarithms of the shown targets.
    """
    methods: dict[str, JSON] = {}
    for word, pred in predictives.items():
        ends = _intervals(pred, levels)
        inside = (ends[0::2] <= targets.cpu()) & (targets.cpu() <= ends[1::2])  # (L, N), nested
        within = torch.where(inside.any(0), inside.byte().argmax(0), len(levels))
        methods[word] = {**_moments(pred, ends, log=log), "within": packed(within, "<u1")}
    return {"targets": packed(targets, "<f8"), **_normal(levels), "methods": methods}


def line_numbers(
    predictives: Mapping[str, Predictive], levels: Sequence[float], *, log: bool
) -> dict[str, dict[str, JSON]]:
    """Return moments and intervals along one input by method."""
    return {word: _moments(pred, _intervals(pred, levels), log=log) for word, pred in predictives.items()}


def map_numbers(predictives: Mapping[str, Predictive]) -> dict[str, dict[str, JSON]]:
    """Return the most probable class at each point of a map and its probability in 255ths, by method.

    The points of the predictives are column by column from the bottom, the results row by row from the top.
    """
    fields: dict[str, dict[str, JSON]] = {}
    for word, pred in predictives.items():
        sure, winner = pred.probs.double().cpu().max(1)
        picture = [values.reshape(GRID, GRID).T.flip(0) for values in (winner, (255 * sure).round())]
        fields[word] = {"winner": packed(picture[0], "<u1"), "sure": packed(picture[1], "<u1")}
    return fields


def _is_normal(pred: Predictive) -> bool:
    return pred.normals is not None and len(pred.normals[0]) == 1


def _normal(levels: Sequence[float]) -> dict[str, JSON]:
    """Return the ends of the intervals of the standard normal, two for each level."""
    quantile = NormalDist().inv_cdf
    ends = [quantile(0.5 + sign * 0.5 * level) for level in levels for sign in (-1, 1)]
    return {"levels": list(levels), "normal": packed(np.array(ends), "<f8")}


def _intervals(pred: Predictive, levels: Sequence[float]) -> Tensor:
    """Return lower and upper ends of the interval of each level, (2 L, N) in float64."""
    ends = [end.double().cpu()[:, 0] for level in levels for end in pred.interval(level)]
    return torch.stack(ends)


def _moments(pred: Predictive, ends: Tensor, *, log: bool) -> dict[str, JSON]:
    """Return the mean (with `log` the median) and standard deviation, and the standardised ends if not normal."""
    scale = pred.std[:, 0].double().cpu()
    middle = (pred.quantile(0.5) if log else pred.mean)[:, 0].double().cpu()
    known = {"middle": packed(middle, "<f8"), "scale": packed(scale, "<f8")}
    if _is_normal(pred):
        return {**known}
    return {**known, "ends": packed(((ends - middle) / scale).T, "<f4")}


def finite(values: Sequence[float] | Tensor) -> list[JSON]:
    """Return numbers for JSON, in seven significant digits; None for numbers that are not finite."""
    numbers = values.tolist() if isinstance(values, Tensor) else values
    return [float(f"{value:.7g}") if math.isfinite(value) else None for value in numbers]
