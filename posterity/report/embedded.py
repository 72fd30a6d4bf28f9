"""The numbers with which a page computes: what methods predict for test rows, packed in few bytes and capped.

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
"""Of the intervals between which a reader chooses."""

MOST_ROWS = 1000
MOST_SEARCHED = 300  # rows where the ends of intervals are searched for, which takes seconds
MOST_BYTES = 700_000
GRID = 56  # points a side of a map
_NUMBER = 16 / 3  # bytes of a float32 in base64


def packed(values: "Tensor | NDArray[Any]", kind: str) -> str:
    """Numbers as base64 of little-endian values of a kind of NumPy, such as "<f4"."""
    array = values.detach().cpu().numpy() if isinstance(values, Tensor) else values
    return base64.b64encode(np.ascontiguousarray(array, dtype=kind).tobytes()).decode("ascii")


def chosen_rows(predictives: Sequence[Predictive]) -> Tensor:
    """The rows of which a page holds predictions: MOST_ROWS of them at most, evenly spaced in their order.

    There are fewer where they would take more than MOST_BYTES, and MOST_SEARCHED where the intervals of a method have
    no closed form.
    """
    count = len(predictives[0])
    each = sum(_NUMBER * _numbers(pred) for pred in predictives)
    known = all(pred.classifies or _is_normal(pred) for pred in predictives)
    most = max(1, min(count, MOST_ROWS if known else MOST_SEARCHED, int(MOST_BYTES / each)))
    return torch.linspace(0, count - 1, most, dtype=torch.float64, device="cpu").round().long()


def _numbers(pred: Predictive) -> int:
    """How many numbers a page holds of a row."""
    if pred.classifies:
        return pred.probs.shape[1]
    return 5 if _is_normal(pred) else 5 + 2 * len(LEVELS)


def class_numbers(predictives: Mapping[str, Predictive], labels: Tensor) -> dict[str, JSON]:
    """Labels and log probabilities of every class, by method, for the scores of classes."""
    return {
        "labels": packed(labels, "<i4"),
        "methods": {word: {"logs": packed(_log_probs(pred), "<f4")} for word, pred in predictives.items()},
    }


def _log_probs(pred: Predictive) -> Tensor:
    """The log probability of every class, (N, C), as scores have it: it may be finite where the probability is 0."""
    label = torch.zeros(len(pred), dtype=torch.int64, device=pred.probs.device)
    return torch.stack([pred.log_prob(label + index).double() for index in range(pred.probs.shape[1])], dim=1)


def number_numbers(
    predictives: Mapping[str, Predictive], targets: Tensor, levels: Sequence[float], *, log: bool
) -> dict[str, JSON]:
    """Targets (N,), and moments and intervals of every method, in the units of the page.

    With `log` the predictives are of logarithms of what is shown.
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
    """Moments and intervals of every method along one input."""
    return {word: _moments(pred, _intervals(pred, levels), log=log) for word, pred in predictives.items()}


def map_numbers(predictives: Mapping[str, Predictive]) -> dict[str, dict[str, JSON]]:
    """The most probable class of every point of a map and its probability in 255ths, by method, from the top row on.

    Points come column by column, from the lowest up.
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
    """The ends of the intervals of the standard normal, two for each level."""
    quantile = NormalDist().inv_cdf
    ends = [quantile(0.5 + sign * 0.5 * level) for level in levels for sign in (-1, 1)]
    return {"levels": list(levels), "normal": packed(np.array(ends), "<f8")}


def _intervals(pred: Predictive, levels: Sequence[float]) -> Tensor:
    """Both ends of the interval of each level, one after the other, (2 L, N) in float64."""
    ends = [end.double().cpu()[:, 0] for level in levels for end in pred.interval(level)]
    return torch.stack(ends)


def _moments(pred: Predictive, ends: Tensor, *, log: bool) -> dict[str, JSON]:
    """Mean (of logarithms the median) and standard deviation; the ends in these units, where they are not normal."""
    scale = pred.std[:, 0].double().cpu()
    middle = (pred.quantile(0.5) if log else pred.mean)[:, 0].double().cpu()
    known = {"middle": packed(middle, "<f8"), "scale": packed(scale, "<f8")}
    if _is_normal(pred):
        return {**known}
    return {**known, "ends": packed(((ends - middle) / scale).T, "<f4")}


def finite(values: Sequence[float] | Tensor) -> list[JSON]:
    """Numbers for JSON, in seven significant digits; None for what is not finite."""
    numbers = values.tolist() if isinstance(values, Tensor) else values
    return [float(f"{value:.7g}") if math.isfinite(value) else None for value in numbers]
