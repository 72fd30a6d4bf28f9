"""`posterity study hyperparameters`: prior and noise by variational EM, against the best of a grid."""

import os
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from posterity.cli.frame import options as o
from posterity.cli.frame.output import one_thread, table
from posterity_studies.commands.frame import Frame, Out, Seed, add_heading, words

if TYPE_CHECKING:
    from posterity_studies.hyperparameters import Study

NAMES = "bostonHousing,energy,wine-quality-red"


def hyperparameters(
    datasets: Annotated[str, typer.Option(metavar="NAMES", help="Of the data sets of `study uci`.")] = NAMES,
    methods: Annotated[str, typer.Option(metavar="NAMES", help="Of laplace and mean-field.")] = "laplace",
    splits: Annotated[int | None, typer.Option(metavar="N", help="The first N splits. Default: all.")] = None,
    steps: Annotated[int | None, typer.Option(metavar="N", help="Training steps of each fit. Default: 5000.")] = None,
    jobs: Annotated[int | None, typer.Option(metavar="N", help="Processes. Default: one for each core.")] = None,
    out: Out = Path("study-hyperparameters"),
    seed: Seed = 0,
    quiet: o.Quiet = False,
    as_json: o.Json = False,
) -> None:
    """Prior and noise by variational EM, without held-out rows, against the best of 49 pairs on the test rows."""
    from posterity.cli.frame.output import option_values

    frame = Frame("hyperparameters", out, seed, quiet, as_json)
    from posterity_studies.hyperparameters import STEPS, check, default_settings, draw, hyperparameters

    jobs = (os.cpu_count() or 1) if jobs is None else jobs
    names, kinds = words(datasets), words(methods)
    with option_values("study hyperparameters"):
        settings = default_settings(STEPS if steps is None else steps, seed)
        check(names, kinds, splits, jobs)
    with one_thread():
        found = hyperparameters(names, kinds, folder=out, splits=splits, settings=settings, jobs=jobs, report=frame.log)
    options = {
        "--datasets": ",".join(names),
        "--methods": ",".join(kinds),
        "--steps": settings.steps,
        "--splits": splits,
    }
    frame.finish(found, draw, _print, options)


def _print(out: Any, found: "Study") -> None:
    from rich.text import Text

    out.print(Text("Prior and noise by variational EM, against the best of a grid", "bold"))
    rows = table("", "best of grid", "variational EM", "difference", "splits", wrap=False)
    for data_set, part in groupby(found.comparisons, lambda one: one.data_set):
        add_heading(rows, data_set)
        for one in part:
            rows.add_row(f"  {one.method}", str(one.best), str(one.em), str(one.difference), str(one.splits))
    out.print(rows)
    out.print(Text("Test NLL in units of the target, mean ± standard error over splits.", "dim"))
    for line in found.notes():
        out.print(Text(line), soft_wrap=True)
