"""`posterity study uci`: any method on the standard UCI regression splits, beside published results."""

import os
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from posterity.cli.frame import options as o
from posterity.cli.frame.output import one_thread, table
from posterity_studies.commands.frame import Frame, Out, Seed, add_heading, words

if TYPE_CHECKING:
    from posterity_studies.uci import Study

NAMES = (
    "bostonHousing",
    "energy",
    "kin8nm",
    "naval-propulsion-plant",
    "power-plant",
    "protein-tertiary-structure",
    "wine-quality-red",
)


def uci(
    datasets: Annotated[str, typer.Option(metavar="NAMES", help=f"all, or some of {', '.join(NAMES)}.")] = "all",
    methods: Annotated[
        str, typer.Option(metavar="NAMES", help="Of map, laplace, dropout and ensemble.")
    ] = "map,laplace",
    splits: Annotated[int | None, typer.Option(metavar="N", help="The first N splits. Default: all.")] = None,
    steps: Annotated[int | None, typer.Option(metavar="N", help="Training steps of each fit. Default: 20000.")] = None,
    jobs: Annotated[int | None, typer.Option(metavar="N", help="Processes. Default: one for each core.")] = None,
    out: Out = Path("study-uci"),
    seed: Seed = 0,
    quiet: o.Quiet = False,
    as_json: o.Json = False,
) -> None:
    """Standard UCI regression splits: RMSE and NLL beside published ones; goes on where it was interrupted."""
    from posterity.cli.frame.output import option_values

    frame = Frame("uci", out, seed, quiet, as_json)
    from posterity.datasets import UCI_REGRESSION
    from posterity_studies.uci import Settings, check, draw, uci

    jobs = (os.cpu_count() or 1) if jobs is None else jobs
    names, kinds = UCI_REGRESSION if datasets.strip() == "all" else words(datasets), words(methods)
    with option_values("study uci"):
        settings = Settings(seed=seed) if steps is None else Settings(steps=steps, seed=seed)
        check(names, kinds, splits, jobs)
    with one_thread():
        found = uci(names, kinds, folder=out, splits=splits, settings=settings, jobs=jobs, report=frame.log)
    options = {
        "--datasets": ",".join(names),
        "--methods": ",".join(kinds),
        "--steps": settings.steps,
        "--splits": splits,
    }
    frame.finish(found, draw, _print, options)


def _print(out: Any, found: "Study") -> None:
    from rich.text import Text

    from posterity_studies.uci import METRICS

    out.print(Text("Standard UCI regression splits, one hidden layer", "bold"))
    rows = table("", *METRICS.values(), "splits", wrap=False)
    for data_set, part in groupby(found.rows, lambda row: row.data_set):
        add_heading(rows, data_set)
        for row in part:
            scores = (str(row.scores.get(metric, "")) for metric in METRICS)
            splits = "" if row.published else str(row.splits)
            rows.add_row(f"  {row.method}", *scores, splits, style="dim" if row.published else "")
    out.print(rows)
    out.print(Text("Mean ± standard error over splits, in units of the target. Dim: published.", "dim"))
    for line in found.notes():
        out.print(Text(line), soft_wrap=True)
