"""`posterity study uci`: any method on the standard UCI regression splits, beside published results."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from posterity.cli import options as o
from posterity.cli.study_frame import Out, Seed, check_folder, check_seed, one_thread, table, words, write_results

if TYPE_CHECKING:
    from posterity.studies.uci import Study

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
    from posterity.cli.errors import option_values
    from posterity.cli.output import console, log, print_json

    check_seed(seed)
    check_folder(out)
    from posterity.datasets import UCI_REGRESSION
    from posterity.studies.uci import Settings, check, draw, uci

    jobs = (os.cpu_count() or 1) if jobs is None else jobs
    names = UCI_REGRESSION if datasets.strip() == "all" else words(datasets)
    with option_values("study uci"):
        settings = Settings(seed=seed) if steps is None else Settings(steps=steps, seed=seed)
        check(names, words(methods), splits, jobs)
    with one_thread():
        found = uci(
            names,
            words(methods),
            folder=out,
            splits=splits,
            settings=settings,
            jobs=jobs,
            report=lambda line: log(line, quiet=quiet),
        )
    figures = draw(found, out)
    options = ["--datasets", ",".join(names), "--methods", ",".join(words(methods)), "--steps", str(settings.steps)]
    options += [] if splits is None else ["--splits", str(splits)]
    document = write_results("uci", out, [*options, "--seed", str(seed)], figures, found.document())
    if as_json:
        print_json(document)
    else:
        _print(console(), found, out)


def _print(out: Any, found: "Study", folder: Path) -> None:
    from rich.text import Text

    from posterity.studies.uci import METRICS

    out.print(Text("Standard UCI regression splits, one hidden layer", "bold"))
    rows = table("", *METRICS.values(), "splits")
    for column in rows.columns:
        column.no_wrap = True
    last = None
    for row in found.rows:
        if row.data_set != last:
            if last:
                rows.add_section()
            rows.add_row(Text(row.data_set, "bold"))
            last = row.data_set
        scores = (str(row.scores.get(metric, "")) for metric in METRICS)
        splits = "" if row.published else str(row.splits)
        rows.add_row(f"  {row.method}", *scores, splits, style="dim" if row.published else "")
    out.print(rows)
    out.print(Text("Mean ± standard error over splits, in units of the target. Dim: published.", "dim"))
    for line in (*found.notes(), f"figures and results.json: {folder}"):
        out.print(Text(line), soft_wrap=True)
