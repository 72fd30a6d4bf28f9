"""`posterity study moons`: seven methods on two moons, over seeds."""

from pathlib import Path
from typing import Any

from posterity.cli import options as o
from posterity.cli.study_frame import Out, Seed, check_folder, check_seed, one_thread, table, write_results


def moons(out: Out = Path("study-moons"), seed: Seed = 0, quiet: o.Quiet = False, as_json: o.Json = False) -> None:
    """Two moons by seven methods and five seeds: NLL, calibration, entropy on the data and far away."""
    from posterity.cli.output import console, log, print_json

    check_seed(seed)
    check_folder(out)
    from posterity.studies.moons import draw, moons

    log("computing: five seeds, seven methods each", quiet=quiet)
    with one_thread():
        found = moons(seed)
        log(f"drawing into {out}", quiet=quiet)
        figures = draw(found, out)
    document = write_results("moons", out, ["--seed", str(seed)], figures, found.document())
    if as_json:
        print_json(document)
    else:
        _print(console(), document, out)


def _print(out: Any, document: dict[str, Any], folder: Path) -> None:
    from rich.text import Text

    out.print(Text(f"Two moons, {document['rows']} rows, {len(document['seeds'])} seeds", "bold"))
    rows = table("method", "test NLL", "ECE", "on data", "far away")
    for column in rows.columns:
        column.no_wrap = True
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
    out.print(Text(f"figures and results.json: {folder}"), soft_wrap=True)


def _shown(value: dict[str, float]) -> str:
    return f"{value['mean']:.3f}±{0.5 * (value['upper'] - value['lower']):.3f}"
