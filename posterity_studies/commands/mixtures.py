"""`posterity study mixtures`: EM from two clusters to the prior of a network."""

from pathlib import Path
from typing import Any

from posterity.cli.frame import options as o
from posterity.cli.frame.output import one_thread, table
from posterity_studies.commands.frame import Found, Frame, Out, Seed


def mixtures(
    out: Out = Path("study-mixtures"), seed: Seed = 0, quiet: o.Quiet = False, as_json: o.Json = False
) -> None:
    """EM and its bound on two clusters, labels, restarts, numbers of components, and the prior of a network."""
    frame = Frame("mixtures", out, seed, quiet, as_json)
    from posterity_studies.mixtures import draw, mixtures

    with one_thread():
        found = mixtures(seed, report=frame.log)
    frame.finish(found, draw, _print)


def _print(out: Any, found: Found) -> None:
    from rich.text import Text

    from posterity_studies.results import with_error

    document = found.document()
    example, labels, clusters, priors = (document[name] for name in ("example", "labels", "clusters", "priors"))
    out.print(Text(f"Two normal densities, {example['points']} points", "bold"))
    out.print(_values(example))
    out.print(Text("The bound of EM, in nats", "bold"))
    out.print(_checks(document))
    out.print(
        Text(
            "The misprints are to be compared with the log-likelihood at the start: the first and the last are not "
            "tight, and the second is above it, so that it is no bound.",
            "dim",
        )
    )
    out.print()
    out.print(Text(f"Labels: error of the means, {labels['data_sets']} data sets of {labels['points']} points", "bold"))
    rows = table("share of labels", "error")
    for row in labels["shares"]:
        rows.add_row(f"{100 * row['share']:g} %", with_error(row["error"], row["standard_error"]))
    out.print(rows)
    out.print(Text(f"Five clusters in the plane, {clusters['rows']} rows: log-likelihood where EM ends", "bold"))
    rows = table("start", "best", "median", "worst", "at the best")
    for row in clusters["starts"]:
        numbers = (max(row["ends"]), row["middle"], row["worst"])
        rows.add_row(row["kind"], *(f"{number:.2f}" for number in numbers), f"{100 * row['share_at_best']:.0f} %")
    out.print(rows)
    rows = table("components", "BIC", "ELBO", "alive")
    for row in clusters["components"]:
        rows.add_row(str(row["components"]), f"{row['bic']:.1f}", f"{row['elbo']:.2f}", str(row["alive"]))
    out.print(rows)
    out.print(Text(f"Prior of a network, {priors['data_sets']} data sets of {priors['rows']} rows", "bold"))
    out.print(_priors(priors))
    out.print(Text("Above best: test NLL minus that of the fixed scale that is best on the same test rows.", "dim"))


def _values(example: dict[str, Any]) -> Any:
    rows = table("", "weight", "mean 1", "mean 2", "variance 1", "variance 2")
    for name in ("truth", "with_labels", "start", "by_em"):
        at = example[name]
        numbers = (at["weights"][0], *at["means"], *at["variances"])
        rows.add_row(name.replace("_", " ").replace("em", "EM"), *(f"{number:.4f}" for number in numbers))
    return rows


CHECKS = {
    "rounds": ("rounds of EM", "d"),
    "log_likelihood_start": ("log-likelihood at the start", ".6f"),
    "log_likelihood_end": ("log-likelihood at the end", ".6f"),
    "touching": ("bound off log-likelihood after E-steps", ".1e"),
    "highest_above": ("bound above it anywhere, at most", ".1e"),
    "decomposition": ("gap off the KL divergence", ".1e"),
    "two_forms": ("two forms of the bound apart", ".1e"),
    "smallest_step": ("smallest gain of a half-step", ".1e"),
    "fisher": ("gradient: Fisher's identity off autograd", ".1e"),
    "end_gradient": ("gradient at the end", ".1e"),
    "common_q": ("misprint: one q for all points, the best", ".6f"),
    "one_divergence": ("misprint: KL of the first point alone", ".6f"),
    "one_entropy": ("misprint: entropy of the first point alone", ".6f"),
}


def _checks(document: dict[str, Any]) -> Any:
    both = [document[name]["checks"] for name in ("example", "miniature")]
    rows = table("", f"{document['example']['points']} points", f"{len(document['miniature']['points'])} points")
    for key, (name, form) in CHECKS.items():
        rows.add_row(name, *(format(one[key], form) for one in both))
    return rows


def _priors(priors: dict[str, Any]) -> Any:
    from posterity_studies.results import with_error

    rows = table("prior scale", "test NLL", "above best", "noise")
    for row in priors["fixed"]:
        rows.add_row(f"{row['scale']:g}", with_error(*row["test_nll"].values()), "", f"{priors['noise']:g}")
    for row in priors["variational_em"]:
        scales = ", ".join(dict.fromkeys(f"{scale:.2f}" for scale in row["scales"]))
        errors = (with_error(*row[key].values()) for key in ("test_nll", "above_best"))
        rows.add_row(f"variational EM: {scales}", *errors, f"{row['noise']:.3g}")
    return rows
