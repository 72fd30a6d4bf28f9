"""`posterity predict`: the predictions of a finished run, as a table."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from posterity.cli.frame import options as o
from posterity.cli.frame.output import log, print_json
from posterity.cli.frame.spread import command

if TYPE_CHECKING:
    from torch import Tensor

    from posterity.cli.frame.sources import Source
    from posterity.predictive.predictive import Predictive


@command
def predict(
    run: o.Run,
    reading: o.ReadingOptions,
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            metavar="DATA",
            help="A file whose rows to predict, or a data set whose test inputs to take. Default: the run's test rows.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Write the CSV here. Default: standard output.")
    ] = None,
    as_json: o.Json = False,
) -> None:
    """Predict with the posterior in RUN; prints CSV, the inputs first, in the order of the rows.

    Regression: mean, std, and lower and upper, between which 95 % of targets fall.

    Classification: a probability p_ for each class, the prediction, and the entropy in nats.
    """
    from posterity.cli.frame.folders import find_rows, find_run
    from posterity.cli.frame.sources import say_notes
    from posterity.storage.disk import write_file

    opened = find_run(run)
    source = find_rows(opened, data, reading, "predict", targets=False)
    say_notes(source)
    rows, config = source.data, opened.config
    inputs = _inputs(source)
    predicted = _predicted(source, config["classes"], opened.posterior.predict(rows.test.inputs))
    columns = {**inputs, **{_free(name, inputs): values for name, values in predicted.items()}}
    if out is not None:
        write_file(out, _csv(columns).encode())
        log(f"{len(rows.test)} predictions in {out}", quiet=as_json)
    if as_json:
        table = [list(row) for row in zip(*columns.values(), strict=True)]
        print_json(
            {
                "run": str(run),
                "data": rows.name,
                "task": rows.task,
                "method": config["method"],
                "columns": list(columns),
                "rows": table,
                "file": None if out is None else str(out),
            },
            indent=None,
        )
    elif out is None:
        print(_csv(columns), end="")


def _inputs(source: "Source") -> dict[str, list[Any]]:
    """The columns of the file as written, or the inputs x1, x2, ..."""
    if source.table is not None:
        return {column.name: list(column.fields) for column in source.table.rows(source.test).columns}
    return {f"x{index}": column.tolist() for index, column in enumerate(source.data.test.inputs.T, start=1)}


def _predicted(source: "Source", classes: list[str] | None, predictive: "Predictive") -> dict[str, list[Any]]:
    """What is predicted, by column, in the units and with the class names of the training rows."""
    if classes is None:
        predictive, _, scale = source.own_units(predictive)
        shift = 0.0 if source.log_target else source.shift
        lower, upper = (end.double() * scale + shift for end in predictive.interval(0.95))
        mean, std = predictive.mean.double() * scale + shift, predictive.std.double() * scale
        columns: dict[str, list[Any]] = {}
        for name, values in (("mean", mean), ("std", std), ("lower", lower), ("upper", upper)):
            columns.update(_outputs(name, values))
        return columns
    columns = {f"p_{name}": column.tolist() for name, column in zip(classes, predictive.probs.T, strict=True)}
    columns["prediction"] = [classes[index] for index in predictive.probs.argmax(-1).tolist()]
    columns["entropy"] = predictive.entropy.tolist()
    return columns


def _free(name: str, taken: dict[str, list[Any]]) -> str:
    """`name`, marked where the file has a column that is called so."""
    while name in taken:
        name = f"predicted_{name}"
    return name


def _outputs(name: str, values: "Tensor") -> dict[str, list[float]]:
    """One column for each output, numbered where there are several."""
    several = values.shape[1] > 1
    return {f"{name}{index}" if several else name: column.tolist() for index, column in enumerate(values.T, start=1)}


def _csv(columns: dict[str, list[Any]]) -> str:
    import csv
    import io

    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    for row in zip(*columns.values(), strict=True):
        writer.writerow(f"{value:.9g}" if isinstance(value, float) else value for value in row)
    return text.getvalue()
