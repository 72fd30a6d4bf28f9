"""`posterity study calibration`: whether methods are right on average over data that the model itself makes."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from posterity.cli import options as o
from posterity.cli.study_frame import Out, Seed, check_folder, check_seed, one_thread, table, words, write_results

if TYPE_CHECKING:
    from posterity.studies.calibration import Study

MODELS = ("linear", "logistic", "network")
METHODS = ("nuts", "hmc", "mala", "metropolis", "langevin", "sgld", "mean-field", "laplace")


def calibration(
    models: Annotated[str, typer.Option(metavar="NAMES", help=f"Of {', '.join(MODELS)}.")] = ",".join(MODELS),
    methods: Annotated[
        str, typer.Option(metavar="NAMES", help=f"Of {', '.join(METHODS)}.")
    ] = "nuts,hmc,mala,metropolis",
    replicates: Annotated[int, typer.Option(metavar="N", help="Data sets for each model.")] = 1000,
    draws: Annotated[int, typer.Option(metavar="N", help="Draws among which a true value is ranked.")] = 31,
    out: Out = Path("study-calibration"),
    seed: Seed = 0,
    quiet: o.Quiet = False,
    as_json: o.Json = False,
) -> None:
    """Simulation-based calibration: ranks of true values among posterior draws, all replicates in one batch."""
    from posterity.cli.errors import option_values
    from posterity.cli.output import console, log, print_json

    check_seed(seed)
    check_folder(out)
    from posterity.studies.calibration import calibration, check, draw

    with option_values("study calibration"):
        check(words(models), words(methods), replicates, draws)
    with one_thread():
        found = calibration(
            words(models), words(methods), replicates, draws, seed, report=lambda line: log(line, quiet=quiet)
        )
        log(f"drawing into {out}", quiet=quiet)
        figures = draw(found, out)
    options = ["--models", ",".join(words(models)), "--methods", ",".join(words(methods))]
    options += ["--replicates", str(replicates), "--draws", str(draws), "--seed", str(seed)]
    document = write_results("calibration", out, options, figures, found.document())
    if as_json:
        print_json(document)
    else:
        _print(console(), found, out)


def _print(out: Any, found: "Study", folder: Path) -> None:
    from rich.text import Text

    from posterity.studies.calibration.study import THRESHOLD

    one = found.rows[0].found
    out.print(Text(f"Ranks of true values among {one.draws} draws, {one.replicates:,} replicates", "bold"))
    rows = table("", "smallest p", "of", "lag 1", "accepted", "")
    for column in rows.columns:
        column.no_wrap = True
    last = None
    for row in found.rows:
        if row.model != last:
            if last:
                rows.add_section()
            rows.add_row(Text(row.model, "bold"))
            last = row.model
        calibrated = row.found
        rows.add_row(
            f"  {row.method}",
            f"{calibrated.smallest:.2g}",
            row.worst,
            f"{max(calibrated.autocorrelations.values()):.2f}",
            "" if calibrated.accept is None else f"{calibrated.accept:.2f}",
            Text("passes") if row.passes else Text("fails", "red"),
        )
    out.print(rows)
    out.print(
        Text(
            f"p: of uniform ranks, by chi-square; fails: below {THRESHOLD:g}. Lag 1: largest correlation of "
            "neighbouring draws.",
            "dim",
        )
    )
    out.print(Text(f"figures and results.json: {folder}"), soft_wrap=True)
