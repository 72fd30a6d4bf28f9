"""`posterity predict`: the predictions of a finished run, as a table."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from posterity.cli import options as o

if TYPE_CHECKING:
    from torch import Tensor

    from posterity.datasets import DataSet
    from posterity.predictive.predictive import Predictive


def predict(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="A run folder made by 'posterity fit'.", show_default=False)
    ],
    data: Annotated[
        str | None,
        typer.Option(
            "--data", metavar="DATA", help="Predict at the test inputs of this data set. Default: the run's own."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Write the CSV here. Default: standard output.")
    ] = None,
    as_json: o.Json = False,
) -> None:
    """Predict at test inputs with the posterior in RUN; prints CSV.

    Regression: mean, std, and lower and upper, between which 95 % of targets fall.

    Classification: a probability p_ for each class, the prediction, and the entropy in nats.
    """
    from posterity.cli.folders import open_run
    from posterity.cli.output import log, print_json
    from posterity.cli.tasks import find_data
    from posterity.errors import BadData, BadFolder
    from posterity.report.files import write_file

    try:
        config, posterior = open_run(run)
    except BadFolder as error:
        error.add_note("a run folder is made by 'posterity fit DATA --out RUN'.")
        raise
    rows = find_data(str(config["data"]) if data is None else data)
    wanted = config["network"]["sizes"][0]
    if rows.test.inputs.shape[1:] != (wanted,) or rows.task != config["task"]:
        misfit = BadData(
            f"The run was fitted to {config['task']} with {wanted} inputs ({config['data']}). Got {rows.task} with "
            f"{rows.test.inputs.shape[1]} ({rows.name})."
        )
        misfit.add_note("name data of the same kind with --data, or leave it out.")
        raise misfit
    columns = _columns(rows, config["classes"], posterior.predict(rows.test.inputs))
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


def _columns(data: "DataSet", classes: list[str] | None, predictive: "Predictive") -> dict[str, list[Any]]:
    """The table by column: inputs first, then what is predicted for them."""
    columns: dict[str, list[Any]] = {
        f"x{index}": column.tolist() for index, column in enumerate(data.test.inputs.T, start=1)
    }
    if classes is None:
        lower, upper = predictive.interval(0.95)
        for name, values in (("mean", predictive.mean), ("std", predictive.std), ("lower", lower), ("upper", upper)):
            columns.update(_outputs(name, values))
        return columns
    for name, column in zip(classes, predictive.probs.T, strict=True):
        columns[f"p_{name}"] = column.tolist()
    columns["prediction"] = [classes[index] for index in predictive.probs.argmax(-1).tolist()]
    columns["entropy"] = predictive.entropy.tolist()
    return columns


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
