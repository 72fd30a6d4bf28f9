"""`posterity evaluate`: the scores of a finished run."""

from typing import Annotated

import typer

from posterity.cli.frame import options as o
from posterity.cli.frame.methods import RECIPES
from posterity.cli.frame.output import console, print_json, table
from posterity.cli.frame.spread import command


@command
def evaluate(
    run: o.Run,
    reading: o.ReadingOptions,
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            metavar="DATA",
            help="A file with the target column, or a data set whose test rows to take. Default: the run's test rows.",
        ),
    ] = None,
    as_json: o.Json = False,
) -> None:
    """Score the posterior in RUN on rows whose targets are known."""
    from posterity.cli.frame.columns import columns, scores
    from posterity.cli.frame.folders import find_rows, find_run
    from posterity.cli.frame.sources import say_notes

    opened = find_run(run)
    source = find_rows(opened, data, reading, "evaluate", targets=True)
    say_notes(source)
    method = str(opened.config["method"])
    values = scores(opened.posterior.predict(source.data.test.inputs), source)
    if as_json:
        print_json(
            {
                "run": str(run),
                "data": source.data.name,
                "task": source.data.task,
                "method": method,
                "rows": len(source.data.test),
                "scores": values,
            }
        )
        return
    from rich.text import Text

    out, shown = console(), columns(source.data)
    out.print(Text(f"{source.data.name}, {len(source.data.test)} rows, run {run}", "bold"), soft_wrap=True)
    rows = table("method", *(column.heading for column in shown))
    rows.add_row(RECIPES[method].label, *(column.shown(values[column.key]) for column in shown))
    out.print(rows)
