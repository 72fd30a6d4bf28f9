"""Grids of logarithms, and means and standard deviations over seeds."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import fmean, stdev
from typing import Any

from posterity.errors import positive, positive_whole

ALIKE = 1e-9  # relative difference below which numbers of a grid are equal


def log_grid(low: float, high: float, count: int) -> tuple[float, ...]:
    """Return `count` numbers from `low` to `high` with evenly spaced logarithms; powers of ten are exact.

    >>> log_grid(0.01, 1.0, 3)
    (0.01, 0.1, 1.0)
    """
    positive("log_grid: low", low)
    positive("log_grid: high", high)
    positive_whole("log_grid: count", count)
    if low > high or (count == 1) != (low == high):
        raise ValueError(f"log_grid: low must be below high, and count at least 2. Got {low:g}, {high:g}, {count}.")
    if count == 1:
        return (low,)
    ratio = math.log10(high / low) / (count - 1)
    return tuple(float(f"{low * 10 ** (ratio * index):.12g}") for index in range(count))


def half_power(value: float) -> float:
    """Return the half power of ten nearest to a positive number on a log scale.

    >>> half_power(0.02), half_power(0.8)
    (0.0316227766017, 1.0)
    """
    positive("half_power: value", value)
    return float(f"{10.0 ** (round(2.0 * math.log10(value)) / 2.0):.12g}")


def merged(values: Sequence[float]) -> tuple[float, ...]:
    """Return the numbers, ascending, without those that repeat up to rounding.

    >>> merged([2.0, 1.0, 2.0 + 1e-12])
    (1.0, 2.0)
    """
    results: list[float] = []
    for value in values:
        if nearest(results, value) is None:
            results.append(value)
    return tuple(sorted(results))


def nearest(values: Sequence[float], value: float) -> float | None:
    """Return the element equal to `value` up to rounding, or None."""
    return next((candidate for candidate in values if math.isclose(candidate, value, rel_tol=ALIKE)), None)


def mean_and_spread(values: Sequence[float]) -> tuple[float, float | None]:
    """Return the mean and the sample standard deviation, None for a single value.

    >>> mean_and_spread([1.0, 2.0, 3.0])
    (2.0, 1.0)
    """
    return fmean(values), stdev(values) if len(values) > 1 else None


def over_seeds(fits: Sequence[Mapping[str, float]]) -> dict[str, tuple[float, float | None]]:
    """Return `mean_and_spread` of each score of some fits."""
    return {key: mean_and_spread([scores[key] for scores in fits]) for key in fits[0]}


def row_as_json(row: Any) -> dict[str, Any]:
    """Convert a dataclass whose `scores` map names to (mean, standard deviation) to JSON."""
    scores = {key: {"mean": mean, "standard_deviation": spread} for key, (mean, spread) in row.scores.items()}
    return {**asdict(row), "scores": scores}
