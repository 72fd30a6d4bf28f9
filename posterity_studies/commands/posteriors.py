"""`posterity study posteriors`: NUTS against reference posteriors."""

from pathlib import Path
from typing import Any

from posterity.cli.frame import options as o
from posterity.cli.frame.output import one_thread, table
from posterity_studies.commands.frame import Found, Frame, Out, Seed

LONGEST = 25  # letters of a name in the table


def posteriors(
    out: Out = Path("study-posteriors"), seed: Seed = 0, quiet: o.Quiet = False, as_json: o.Json = False
) -> None:
    """NUTS on eleven posteriors of posteriordb and German credit: errors against reference draws, and diagnostics."""
    frame = Frame("posteriors", out, seed, quiet, as_json)
    from posterity_studies.posteriors import Study, draw, posteriors
    from posterity_studies.posteriors.study import CHAINS, DRAWS, WARMUP

    rows = []
    with one_thread():
        for row in posteriors(seed):
            frame.log(f"{row.posterior} as {row.form}: {row.seconds:.0f} s")
            rows.append(row)
        found = Study(seed, CHAINS, WARMUP, DRAWS, tuple(rows))
    frame.finish(found, draw, _print)


def _print(out: Any, found: Found) -> None:
    from rich.text import Text

    document = found.document()
    limits = document["limits"]
    settings = f"{document['chains']} chains of {document['warmup']} + {document['draws']} transitions"
    out.print(Text(f"NUTS, {settings}", "bold"))
    rows = table("posterior", "form", "mean", "sd", "R-hat", "ESS", "div.%", "s")
    for row in document["posteriors"]:
        rows.add_row(
            _short(row["posterior"]),
            row["form"],
            f"{row['mean_errors']:.1f}",
            f"{row['sd_errors']:.1f}",
            f"{row['rhat']:.4f}",
            f"{row['ess']:,.0f}",
            f"{100 * row['divergent']:.2f}",
            f"{row['seconds']:.0f}",
        )
    out.print(rows)
    good = sum(row["good"] for row in document["posteriors"])
    out.print(
        Text(
            f"{good} of {len(document['posteriors'])} within: mean {limits['mean_errors']:g} and sd "
            f"{limits['sd_errors']:g} combined standard errors from the reference, R-hat {limits['rhat']:g}, "
            f"ESS {limits['ess']:,.0f}, divergent {100 * limits['divergent']:g} %. The worst parameter of each counts.",
            "dim",
        )
    )


def _short(name: str) -> str:
    """The name of data and model, or that of the model where both are too long for a line."""
    return name if len(name) <= LONGEST else name.split("-")[-1]
