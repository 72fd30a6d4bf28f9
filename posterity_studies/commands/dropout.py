"""`posterity study dropout`: dropout as inference told from end to end."""

from pathlib import Path
from typing import Any

from posterity.cli.frame import options as o
from posterity.cli.frame.output import one_thread, table
from posterity_studies.commands.frame import Found, Frame, Out, Seed


def dropout(out: Out = Path("study-dropout"), seed: Seed = 0, quiet: o.Quiet = False, as_json: o.Json = False) -> None:
    """MC dropout on a curve and on two moons, all masks of a tiny network, the KL condition."""
    frame = Frame("dropout", out, seed, quiet, as_json)
    from posterity_studies.dropout import draw, dropout

    frame.log("computing: a curve, two moons, all masks, divergences")
    with one_thread():
        found = dropout(seed)
    frame.finish(found, draw, _print)


def _print(out: Any, found: Found) -> None:
    from rich.text import Text

    document = found.document()
    curve, moons, tiny = document["regression"], document["classification"], document["enumeration"]
    out.print(Text(f"y = sin(x) + x, {curve['rows']} rows on 1 < |x| < 4: standard deviation of f", "bold"))
    out.print(_curves(curve))
    out.print(Text(f"Two moons, {moons['rows']} rows: entropy of the label, in nats", "bold"))
    out.print(_moons(moons))
    out.print(Text(f"Far away: on a circle of radius {moons['ring']:g}.", "dim"))
    out.print()
    out.print(
        Text(
            f"Mean and variance by S draws against all {tiny['masks']} masks of a tiny network",
            "bold",
        )
    )
    out.print(_estimates(tiny))
    out.print(Text("Where training takes a wrong KL for granted: |m| below so many s", "bold"))
    out.print(_failures(document["divergence"]))
    convention = curve["convention"]
    lines = (
        f"precision tau of MC dropout on the curve: {convention['precision']:.3f} (length-scale "
        f"{convention['length_scale']:.4f}); as weight decay beside a mean squared error: "
        f"{convention['weight_decay_of_the_same_model_with_squared_error']:.3e}",
        "KL of the exact predictive from the Gaussian with its moments: "
        f"{tiny['kl_from_the_moment_matched_gaussian']:.4f} nats",
    )
    for line in lines:
        out.print(Text(line), soft_wrap=True)


def _curves(curve: dict[str, Any]) -> Any:
    rows = table("method", "test NLL", "on data", "in gap", "outside", "rates")
    for row in curve["methods"]:
        numbers = ("test_nll", "scale_on_the_data", "scale_in_the_gap", "scale_outside")
        rates = ", ".join(f"{rate:.2f}" for rate in row["rates"])
        rows.add_row(row["method"], *(f"{row[key]:.3f}" for key in numbers), rates)
    return rows


def _moons(moons: dict[str, Any]) -> Any:
    rows = table("method", "test NLL", "accuracy", "on the data", "far away")
    for row in moons["methods"]:
        numbers = ("test_nll", "test_accuracy", "entropy_on_the_data", "entropy_on_the_ring")
        rows.add_row(row["method"], *(f"{row[key]:.4f}" for key in numbers))
    return rows


def _estimates(tiny: dict[str, Any]) -> Any:
    rows = table("draws", "mean off by", "theory", "scatter / S", "/ (S - 1)", "exact")
    for row in tiny["estimates"]:
        numbers = ("mean_error", "mean_error_by_theory", "plug_in_variance", "unbiased_variance")
        rows.add_row(str(row["draws"]), *(f"{row[key]:.4f}" for key in numbers), f"{tiny['variance']:.4f}")
    return rows


def _failures(failures: list[dict[str, Any]]) -> Any:
    rows = table("rate", "s l", "wrong in sign", "off by a per cent")
    for row in failures:
        rows.add_row(
            f"{row['rate']:g}", f"{row['width']:g}", f"{row['distance']:.2f}", f"{row['within_a_percent']:.2f}"
        )
    return rows
