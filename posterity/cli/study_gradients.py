"""`posterity study gradients`: variances of the estimators of an ELBO's gradient."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from posterity.cli import options as o
from posterity.cli.study_frame import Out, Seed, check_folder, check_seed, one_thread, table, write_results

if TYPE_CHECKING:
    from posterity.studies.gradients import Study


def gradients(
    out: Out = Path("study-gradients"), seed: Seed = 0, quiet: o.Quiet = False, as_json: o.Json = False
) -> None:
    """Variances of gradient estimators, for one weight against exact values and for a small network."""
    from posterity.cli.output import console, log, print_json

    check_seed(seed)
    check_folder(out)
    from posterity.studies.gradients import draw, gradients

    log("computing: one weight, a small network before and after training", quiet=quiet)
    with one_thread():
        found = gradients(seed)
        log(f"drawing into {out}", quiet=quiet)
        figures = draw(found, out)
    document = write_results("gradients", out, ["--seed", str(seed)], figures, found.document())
    if as_json:
        print_json(document)
    else:
        _print(console(), found, out)


def _print(out: Any, found: "Study", folder: Path) -> None:
    from rich.text import Text

    from posterity.studies.gradients.variances import ROUNDING

    out.print(Text("One weight, q = N(0.7, 0.4²): variance of the gradient of E f(w) + H(q)", "bold"))
    rows = table("estimator", "in mean", "exact", "in scale", "exact")
    for last, row in zip((None, *found.example), found.example, strict=False):
        if last is None or last.function != row.function:
            rows.add_row(f"f = {row.function}", style="bold")
        numbers = []
        for variance in (row.mean, row.scale):
            assert variance.exact is not None
            numbers += [str(variance), f"{variance.exact:.3g}" if variance.exact > ROUNDING else "0"]
        rows.add_row(f"  {row.estimator}", *numbers)
    for column in rows.columns:
        column.no_wrap = True
    out.print(rows)
    out.print(Text("Small network, all weights together: variance of the gradient of the ELBO", "bold"))
    rows = table("estimator", "in the means", "in the scales")
    for before, one in zip((None, *found.network), found.network, strict=False):
        if before is None or before.when != one.when:
            rows.add_row(f"q {one.when}", style="bold")
        rows.add_row(f"  {one.estimator}", str(one.mean), str(one.scale))
    out.print(rows)
    out.print(
        Text("± standard error. An estimate from K passes through the data counts K times its variance.", "dim"),
        soft_wrap=True,
    )
    out.print(Text(f"figures and results.json: {folder}"), soft_wrap=True)
