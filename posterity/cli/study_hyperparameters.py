"""`posterity study hyperparameters`: prior and noise by variational EM, against the best of a grid."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from posterity.cli import options as o
from posterity.cli.study_frame import Out, Seed, check_folder, check_seed, one_thread, table, words, write_results

if TYPE_CHECKING:
    from posterity.studies.hyperparameters import Study

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
    from posterity.cli.errors import option_values
    from posterity.cli.output import console, log, print_json

    check_seed(seed)
    check_folder(out)
    from posterity.studies.hyperparameters import STEPS, check, default_settings, draw, hyperparameters

    jobs = (os.cpu_count() or 1) if jobs is None else jobs
    names, kinds = words(datasets), words(methods)
    with option_values("study hyperparameters"):
        settings = default_settings(STEPS if steps is None else steps, seed)
        check(names, kinds, splits, jobs)
    with one_thread():
        found = hyperparameters(
            names,
            kinds,
            folder=out,
            splits=splits,
            settings=settings,
            jobs=jobs,
            report=lambda line: log(line, quiet=quiet),
        )
    figures = draw(found, out)
    options = ["--datasets", ",".join(names), "--methods", ",".join(kinds), "--steps", str(settings.steps)]
    options += [] if splits is None else ["--splits", str(splits)]
    document = write_results("hyperparameters", out, [*options, "--seed", str(seed)], figures, found.document())
    if as_json:
        print_json(document)
    else:
        _print(console(), found, out)


def _print(out: Any, found: "Study", folder: Path) -> None:
    from rich.text import Text

    out.print(Text("Prior and noise by variational EM, against the best of a grid", "bold"))
    rows = table("", "best of grid", "variational EM", "difference", "splits")
    for column in rows.columns:
        column.no_wrap = True
    last = None
    for one in found.comparisons:
        if one.data_set != last:
            if last:
                rows.add_section()
            rows.add_row(Text(one.data_set, "bold"))
            last = one.data_set
        rows.add_row(f"  {one.method}", str(one.best), str(one.em), str(one.difference), str(one.splits))
    out.print(rows)
    out.print(Text("Test NLL in units of the target, mean ± standard error over splits.", "dim"))
    for line in (*found.notes(), f"figures and results.json: {folder}"):
        out.print(Text(line), soft_wrap=True)
