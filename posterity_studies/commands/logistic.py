"""`posterity study logistic`: Bayesian logistic regression told from end to end."""

from pathlib import Path
from typing import Any

from posterity.cli.frame import options as o
from posterity.cli.frame.output import one_thread, table
from posterity_studies.commands.frame import Found, Frame, Out, Seed


def logistic(
    out: Out = Path("study-logistic"), seed: Seed = 0, quiet: o.Quiet = False, as_json: o.Json = False
) -> None:
    """Logistic regression by MAP, Laplace, variational and exact inference: figures and numbers in a folder."""
    frame = Frame("logistic", out, seed, quiet, as_json)
    from posterity_studies.logistic import draw, logistic

    frame.log("computing: fits, exact posterior, rays, three classes")
    with one_thread():
        found = logistic(seed)
    frame.finish(found, draw, _print)


def _print(out: Any, found: Found) -> None:
    from rich.text import Text

    document = found.document()
    out.print(Text("Bayesian logistic regression, 10 rows, 2 weights", "bold"))
    out.print(_methods(document))
    out.print(Text("Error: distance from the exact posterior over the map. Far away: radius 30.", "dim"))
    out.print()
    out.print(Text("Along rays: p(y = 1 | c x) at c = 10 000 against its limit by theory", "bold"))
    out.print(_rays(document))
    draws = document["monte_carlo_draws"]
    note = f"Monte Carlo: {draws['far_along_rays']:,} draws here, {draws['maps']:,} in maps and curves."
    out.print(Text(note, "dim"))
    out.print()
    out.print(Text("log p(y) = ELBO(q) + KL(q || posterior), in nats", "bold"))
    out.print(_parts(document))
    curve, probit = document["laplace_1d"], document["probit"]
    classes = {row["method"]: row["mean_distance"] for row in document["multiclass"]}
    lines = (
        f"log evidence: exact {document['exact']['log_evidence']:.6f}, Laplace "
        f"{document['laplace']['log_evidence']:.6f}",
        f"Laplace in one dimension: log normaliser {curve['laplace_log_normaliser']:.6f}, exact "
        f"{curve['exact_log_normaliser']:.6f}",
        f"probit for sigmoid: off by at most {probit['largest']:.5f}, at a = {probit['at']:.3f}",
        "three classes, mean distance from the exact softmax integral: mean-field probit "
        f"{classes['Laplace, mean-field probit']:.4f}, Monte Carlo {classes['Laplace, Monte Carlo']:.4f}, "
        f"MAP {classes['MAP']:.4f}",
    )
    for line in lines:
        out.print(Text(line), soft_wrap=True)


def _methods(document: dict[str, Any]) -> Any:
    rows = table("method", "largest error", "mean error", "entropy on data", "far away")
    for row in document["methods"]:
        numbers = ("largest_error", "mean_error", "entropy_on_the_data", "entropy_far_away")
        rows.add_row(row["method"], *(f"{row[key]:.4f}" for key in numbers))
    return rows


def _rays(document: dict[str, Any]) -> Any:
    rows = table("method", "probability", "limit", "difference", "standard error")
    for ray in document["rays"]:
        rows.add_row(f"x = ({ray['direction'][0]:g}, {ray['direction'][1]:g})", style="bold")
        for row in ray["methods"]:
            error = f"{ray['monte_carlo_error']:.1e}" if "Monte Carlo" in row["method"] else ""
            difference = f"{abs(row['probability'] - row['limit']):.1e}"
            rows.add_row(row["method"], f"{row['probability']:.6f}", f"{row['limit']:.6f}", difference, error)
    return rows


def _parts(document: dict[str, Any]) -> Any:
    rows = table("q", "log joint", "entropy", "ELBO", "KL", "ELBO + KL")
    for row in document["decomposition"]:
        numbers = ("expected_log_joint", "entropy", "elbo", "divergence")
        rows.add_row(row["name"], *(f"{row[key]:.4f}" for key in numbers), f"{row['sum']:.7f}")
    return rows
