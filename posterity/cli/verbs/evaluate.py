"""`posterity evaluate`: the scores of a finished run."""

from typing import Annotated

import typer

from posterity.cli.frame import options as o


def evaluate(
    run: o.Run,
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            metavar="DATA",
            help="A file with the target column, or a data set whose test rows to take. Default: the run's test rows.",
        ),
    ] = None,
    as_json: o.Json = False,
    separator: o.Separator = None,
    decimal: o.Decimal = None,
    header: o.Header = None,
    encoding: o.Encoding = None,
) -> None:
    """Score the posterior in RUN on rows whose targets are known."""
    from posterity.cli.frame.folders import find_rows, find_run
    from posterity.cli.frame.output import console, print_json
    from posterity.cli.frame.scores import columns, scores
    from posterity.cli.frame.sources import say_notes
    from posterity.cli.frame.tasks import label

    options = o.TableOptions(separator=separator, decimal=decimal, header=header, encoding=encoding)
    opened = find_run(run)
    source = find_rows(opened, data, options, "evaluate", targets=True)
    say_notes(source)
    values, method = scores(opened.posterior, source), str(opened.config["method"])
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
    from rich import box
    from rich.table import Table
    from rich.text import Text

    out = console()
    out.print(Text(f"{source.data.name}, {len(source.data.test)} rows, run {run}", "bold"), soft_wrap=True)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("method")
    for column in columns(source.data):
        table.add_column(column.heading, justify="right")
    table.add_row(label(method), *(column.shown(values[column.key]) for column in columns(source.data)))
    out.print(table)
