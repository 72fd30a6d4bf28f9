"""`posterity study gradients`: variances of the estimators of an ELBO's gradient."""

from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posterity.cli.frame import options as o
from posterity.cli.frame.output import one_thread, table
from posterity_studies.commands.frame import Frame, Out, Seed

if TYPE_CHECKING:
    from posterity_studies.gradients import Study


def gradients(
    out: Out = Path("study-gradients"), seed: Seed = 0, quiet: o.Quiet = False, as_json: o.Json = False
) -> None:
    """Variances of gradient estimators, for one weight against exact values and for a small network."""
    frame = Frame("gradients", out, seed, quiet, as_json)
    from posterity_studies.gradients import draw, gradients

    frame.log("computing: one weight, a small network before and after training")
    with one_thread():
        found = gradients(seed)
    frame.finish(found, draw, _print)


def _print(out: Any, found: "Study") -> None:
    from rich.text import Text

    from posterity_studies.gradients.variances import ROUNDING

    out.print(Text("One weight, q = N(0.7, 0.4²): variance of the gradient of E f(w) + H(q)", "bold"))
    rows = table("estimator", "in mean", "exact", "in scale", "exact", wrap=False)
    for function, part in groupby(found.example, lambda row: row.function):
        rows.add_row(f"f = {function}", style="bold")
        for row in part:
            numbers = []
            for variance in (row.mean, row.scale):
                assert variance.exact is not None
                numbers += [str(variance), f"{variance.exact:.3g}" if variance.exact > ROUNDING else "0"]
            rows.add_row(f"  {row.estimator}", *numbers)
    out.print(rows)
    out.print(Text("Small network, all weights together: variance of the gradient of the ELBO", "bold"))
    rows = table("estimator", "in the means", "in the scales")
    for when, estimates in groupby(found.network, lambda one: one.when):
        rows.add_row(f"q {when}", style="bold")
        for one in estimates:
            rows.add_row(f"  {one.estimator}", str(one.mean), str(one.scale))
    out.print(rows)
    out.print(
        Text("± standard error. An estimate from K passes through the data counts K times its variance.", "dim"),
        soft_wrap=True,
    )
