"""`posterity study moons`: seven methods on two moons, over seeds."""

from pathlib import Path
from typing import Any

from posterity.cli.frame import options as o
from posterity.cli.frame.output import one_thread, table
from posterity_studies.commands.frame import Found, Frame, Out, Seed


def moons(out: Out = Path("study-moons"), seed: Seed = 0, quiet: o.Quiet = False, as_json: o.Json = False) -> None:
    """Two moons by seven methods and five seeds: NLL, calibration, entropy on the data and far away."""
    frame = Frame("moons", out, seed, quiet, as_json)
    from posterity_studies.moons import draw, moons

    frame.log("computing: five seeds, seven methods each")
    with one_thread():
        found = moons(seed)
    frame.finish(found, draw, _print)


def _print(out: Any, found: Found) -> None:
    from rich.text import Text

    document = found.document()
    out.print(Text(f"Two moons, {document['rows']} rows, {len(document['seeds'])} seeds", "bold"))
    rows = table("method", "test NLL", "ECE", "on data", "far away", wrap=False)
    for row in document["methods"]:
        keys = ("test_nll", "calibration_error", "entropy_on_the_data", "entropy_on_the_ring")
        rows.add_row(row["method"], *(_shown(row[key]) for key in keys))
    out.print(rows)
    out.print(
        Text(
            "Mean and half a 95 % interval over seeds. On data, far away: entropy of the label in nats, at training "
            f"rows and on a circle of radius {document['ring']:g}.",
            "dim",
        )
    )


def _shown(value: dict[str, float]) -> str:
    return f"{value['mean']:.3f}±{0.5 * (value['upper'] - value['lower']):.3f}"
