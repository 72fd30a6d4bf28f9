"""Predictions as columns, in CSV and JSON, for `predict` and `serve`."""

import csv
import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from posterity.cli.frame.sources import Source
    from posterity.predictive.predictive import Predictive


def predicted_columns(
    source: "Source", classes: list[str] | None, predictive: "Predictive", level: float, quantiles: Sequence[float]
) -> dict[str, list[Any]]:
    """Return the predictions by column, in units of the file or with the names of the classes."""
    import torch

    if classes is None:
        predictive, _, scale = source.own_units(predictive)
        shift = 0.0 if source.log_target else source.shift
        names = ("mean", "std", "lower", "upper", "aleatoric_std", "epistemic_std")
        moments = (predictive.mean, predictive.std, *predictive.interval(level))
        values = torch.stack((*moments, predictive.aleatoric, predictive.epistemic)).double()  # (6, N, T)
        values[4:].clamp_min_(0.0).sqrt_()
        values *= scale
        values[0] += shift
        values[2:4] += shift
        columns: dict[str, list[Any]] = {}
        for name, value in zip(names, values.mT.tolist(), strict=True):
            columns.update(by_output(name, value))
        for p in quantiles:
            values = predictive.quantile(p).double() * scale + shift  # (N, T)
            columns.update(by_output(f"q{p:g}", values.mT.tolist()))
        return columns
    columns = {f"p_{name}": column.tolist() for name, column in zip(classes, predictive.probs.T, strict=True)}
    columns["prediction"] = [classes[index] for index in predictive.probs.argmax(-1).tolist()]
    columns["entropy"] = predictive.entropy.tolist()
    columns["aleatoric"], columns["epistemic"] = predictive.aleatoric.tolist(), predictive.epistemic.tolist()
    return columns


def by_output(name: str, values: Sequence[list[float]]) -> dict[str, list[float]]:
    """Return a column for each output, numbered if there are several."""
    if len(values) == 1:
        return {name: values[0]}
    return {f"{name}{index}": column for index, column in enumerate(values, start=1)}


def csv_text(columns: Mapping[str, Sequence[Any]]) -> str:
    """Return the columns as CSV, with numbers in nine significant digits."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    for row in zip(*columns.values(), strict=True):
        writer.writerow(f"{value:.9g}" if isinstance(value, float) else value for value in row)
    return text.getvalue()
