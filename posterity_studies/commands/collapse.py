"""`posterity study collapse`: ever wider networks at eta = 1 and at the balanced temperature."""

from pathlib import Path
from typing import Any

from posterity.cli.frame import options as o
from posterity.cli.frame.output import one_thread, table
from posterity_studies.commands.frame import Found, Frame, Out, Seed


def collapse(
    out: Out = Path("study-collapse"), seed: Seed = 0, quiet: o.Quiet = False, as_json: o.Json = False
) -> None:
    """How wide networks fall back to their prior at eta = 1, and do not at eta = tau p/N: slopes against theory."""
    frame = Frame("collapse", out, seed, quiet, as_json)
    from posterity_studies.collapse import collapse, draw

    with one_thread():
        found = collapse(seed, report=frame.log)
    frame.finish(found, draw, _print)


def _print(out: Any, found: Found) -> None:
    from rich.text import Text

    document = found.document()
    out.print(Text("eta = 1: KL(q* || P0) of the network", "bold"))
    out.print(_by_width(document))
    out.print(_laws(document))
    out.print(Text("Slopes of F~ - ELBO, by theory -1", "bold"))
    rows = table("neurons", "slope", "off", "of its bound")
    for row in document["gaps"]:
        name = f"{row['neurons']}: {row['name']}"
        rows.add_row(name, f"{row['slope']:.5f}", f"{row['slope_off']:+.1e}", f"{row['largest_share_of_bound']:.4f}")
    out.print(rows)
    out.print(Text(f"ELBO above F~ anywhere, at most: {document['elbo_above_functional']:.1e} of F~", "dim"))
    out.print()
    out.print(Text("eta = tau p/N: KL of a neuron, and how neurons go to their limit", "bold"))
    out.print(_balanced(document))
    out.print(
        Text(
            "Slope: of the distance of the neurons' parameters from their limit, by theory -1. f moves: the largest "
            "difference of E f from its limit, at the widest.",
            "dim",
        )
    )
    out.print()
    out.print(Text(f"Confidence of the averaged prediction, {document['confidence']['classes']} classes", "bold"))
    out.print(_confidence(document))


def _by_width(document: dict[str, Any]) -> Any:
    cases = document["untempered"]
    rows = table("width", *(heading for case in cases for heading in (case["case"], "/ theory")))
    for place, width in enumerate(document["widths"]):
        numbers = ((case["network_kl"][place], case["ratio_to_law"][place]) for case in cases)
        rows.add_row(f"{width:,}", *(text for kl, ratio in numbers for text in (f"{kl:.3e}", f"{ratio:.4f}")))
    return rows


def _laws(document: dict[str, Any]) -> Any:
    rows = table(f"from width {document['slopes_from_width']}", "slope", "theory", "off", "constant", "ratio")
    for case in document["untempered"]:
        rows.add_row(
            case["case"],
            f"{case['slope']:.5f}",
            str(case["theory_slope"]),
            f"{case['slope_off']:+.1e}",
            f"{case['theory_constant']:.5g}",
            f"{case['constant_ratio']:.6f}",
        )
    return rows


def _balanced(document: dict[str, Any]) -> Any:
    widths = document["widths"]
    shown = (0, -1)
    rows = table("case", "tau", *(f"N = {widths[place]:,}" for place in shown), "limit", "slope", "f moves")
    for case in document["balanced"]:
        for row in case["taus"]:
            numbers = (*(row["kl_per_neuron"][place] for place in shown), row["kl_per_neuron_limit"])
            moved = row["outputs_off_limit"][-1]
            texts = (f"{number:.5g}" for number in numbers)
            rows.add_row(case["case"], f"{row['tau']:g}", *texts, f"{row['slope']:.4f}", f"{moved:.0e}")
    return rows


def _confidence(document: dict[str, Any]) -> Any:
    found, taus = document["confidence"], [row["tau"] for row in document["balanced"][-1]["taus"]]
    rows = table("width", "eta = 1", *(f"tau = {tau:g}" for tau in taus))
    for place, width in enumerate(document["widths"]):
        numbers = (found["eta_1"]["confidence"][place], *(row[place] for row in found["balanced"]["confidence"]))
        rows.add_row(f"{width:,}", *(f"{number:.4f}" for number in numbers))
    rows.add_row("limit", f"{found['uniform']:.4f}", *(f"{number:.4f}" for number in found["limit"]["confidence"]))
    return rows
