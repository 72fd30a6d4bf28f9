"""Specifications of charts for `charts.js`: histograms, curves, bars and traces."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from posterity.report.embedded import finite
from posterity.storage.part import JSON

POINTS = 200
"""Most points of a curve; more would hide each other."""

Chart = dict[str, JSON]


def histogram(label: str, axis: str, values: Mapping[str, Tensor], *, rule: float | None = None) -> Chart:
    """Return histograms of the values by name, as shares in up to 24 equal bins; `rule` is a vertical line."""
    pooled = torch.cat([each[each.isfinite()].double().cpu() for each in values.values()])
    low, high = (float(pooled.min()), float(pooled.max())) if len(pooled) else (0.0, 1.0)
    if low == high:
        low, high = low - 0.5, high + 0.5
    bins = max(6, min(24, math.isqrt(max(1, len(pooled)))))
    edges = torch.linspace(low, high, bins + 1, dtype=torch.float64, device="cpu")
    series = []
    for index, (name, each) in enumerate(values.items()):
        inside = each[each.isfinite()].double().cpu()
        counts = torch.histogram(inside, edges).hist
        notes = [f"{int(count):,} rows" for count in counts.tolist()]
        share = finite(counts / max(1, len(each)))
        series.append(
            {"kind": "bars", "name": name, "colour": index, "edges": finite(edges), "y": share, "notes": notes}
        )
    return _chart(label, {"label": axis}, {"label": "share of rows", "zero": True}, series, rule=rule)


def curves(label: str, axis: str, height: str, lines: Mapping[str, tuple[Tensor, Tensor]]) -> Chart:
    """Return lines by name, each (x, y) of (T,), thinned to POINTS; positive y over a large range get a log axis."""
    series, heights = [], []
    for index, (name, (x, y)) in enumerate(lines.items()):
        chosen = torch.linspace(0, len(y) - 1, min(len(y), POINTS), dtype=torch.float64, device="cpu").round().long()
        heights.append(y.cpu()[chosen].double())
        line = {"kind": "line", "name": name, "colour": index % 8, "dash": index}
        series.append({**line, "x": finite(x.cpu()[chosen].double()), "y": finite(heights[-1])})
    pooled = torch.cat(heights)
    pooled = pooled[pooled.isfinite()]
    spans = bool(len(pooled)) and float(pooled.min()) > 0 and float(pooled.max()) > 20 * float(pooled.min())
    return _chart(label, {"label": axis}, {"label": height, "log": spans}, series)


def traces(label: str, height: str, draws: Tensor) -> Chart:
    """Return the draws (C, D) of each chain in order, thinned to POINTS."""
    steps = torch.arange(1, draws.shape[1] + 1, device="cpu")
    chart = curves(label, "draw", height, {f"chain {index}": (steps, each) for index, each in enumerate(draws)})
    series: Any = chart["series"]
    chart["series"] = [{**line, "thin": True, "dash": 0} for line in series]
    chart["y"] = {"label": height}
    return chart


def bars(label: str, axis: str, names: Sequence[str], values: Sequence[float], errors: Sequence[float]) -> Chart:
    """Return a bar for each name, with two standard errors to each side."""
    ends = [(value - 2 * error, value + 2 * error) for value, error in zip(values, errors, strict=True)]
    series: dict[str, JSON] = {
        "kind": "rows",
        "colour": 0,
        "along": "x",
        "x": finite(values),
        "y": list(range(len(names))),
        "low": finite([low for low, _ in ends]),
        "high": finite([high for _, high in ends]),
    }
    wide = _chart(label, {"label": axis, "zero": True}, {"names": list(names)}, [series])
    return {**wide, "interval": "within two standard errors"}


def _chart(
    label: str, x: dict[str, Any], y: dict[str, Any], series: Sequence[dict[str, Any]], *, rule: float | None = None
) -> Chart:
    if len(series) == 1 and series[0].get("name"):
        series = [{**series[0], "name": ""}]  # the caption says what it is
    return {"label": label, "x": x, "y": y, "series": list(series), "rules": [] if rule is None else [{"x": rule}]}
