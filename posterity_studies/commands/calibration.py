"""`posterity study calibration`: whether methods are right on average over data that the model itself makes."""

from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from posterity.cli.frame import options as o
from posterity.cli.frame.output import one_thread, table
from posterity_studies.commands.frame import Frame, Out, Seed, add_heading, words

if TYPE_CHECKING:
    from posterity_studies.calibration import Study

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
    from posterity.cli.frame.output import option_values

    frame = Frame("calibration", out, seed, quiet, as_json)
    from posterity_studies.calibration import calibration, check, draw

    names, kinds = words(models), words(methods)
    with option_values("study calibration"):
        check(names, kinds, replicates, draws)
    with one_thread():
        found = calibration(names, kinds, replicates, draws, seed, report=frame.log)
    options = {
        "--models": ",".join(names),
        "--methods": ",".join(kinds),
        "--replicates": replicates,
        "--draws": draws,
    }
    frame.finish(found, draw, _print, options)


def _print(out: Any, found: "Study") -> None:
    from rich.text import Text

    from posterity_studies.calibration.study import THRESHOLD

    one = found.rows[0].found
    out.print(Text(f"Ranks of true values among {one.draws} draws, {one.replicates:,} replicates", "bold"))
    rows = table("", "smallest p", "of", "lag 1", "accepted", "", wrap=False)
    for model, part in groupby(found.rows, lambda row: row.model):
        add_heading(rows, model)
        for row in part:
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
