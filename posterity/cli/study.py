"""`posterity study`: a worked experiment, from data to figures and numbers."""

import os
import platform
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer

import posterity
from posterity.cli import options as o

STUDIES = ("logistic",)


def study(
    name: Annotated[str, typer.Argument(metavar="NAME", help=f"A study: {', '.join(STUDIES)}.", show_default=False)],
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where figures and results.json go. Default: study-NAME.")
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Fixes the Monte Carlo draws and the sampled rows.")] = 0,
    quiet: o.Quiet = False,
    as_json: o.Json = False,
) -> None:
    """Run a study: logistic regression by MAP, Laplace and exact integration; figures and numbers in a folder."""
    from posterity.cli.errors import UsageError, option_values
    from posterity.cli.output import console, log, print_json
    from posterity.errors import unknown
    from posterity.report.files import check_figure_path, write_file

    if name not in STUDIES:
        raise UsageError(unknown("study", name, STUDIES), f"the studies are {', '.join(STUDIES)}.")
    if not 0 <= seed < 2**63:
        raise UsageError(f"--seed must be a whole number from 0 to 2^63 - 1. Got {seed}.", "any small number will do.")
    folder = out or Path(f"study-{name}")
    with option_values("study"):
        check_figure_path(folder / "maps.png")
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"--out must be a folder. Got the file '{folder}'. Give another path.")
    from posterity.studies.logistic import draw, logistic

    log("computing: fits, exact posterior, rays, three classes", quiet=quiet)
    with _one_thread():
        found = logistic(seed)
        log(f"drawing into {folder}", quiet=quiet)
        figures = draw(found, folder)
    document = {
        "study": name,
        "command": shlex.join(["posterity", "study", name, "--out", str(folder), "--seed", str(seed)]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {
            "posterity": posterity.__version__,
            "python": platform.python_version(),
            **{package: version(package) for package in ("torch", "matplotlib")},
        },
        "figures": figures,
        **found.document(),
    }
    write_file(folder / "results.json", _encoded(document))
    if as_json:
        print_json(document)
    else:
        _print(console(), document, folder)


@contextmanager
def _one_thread() -> Iterator[None]:
    """One thread, as the fits are small; somebody who sets OMP_NUM_THREADS is left alone."""
    import torch

    threads = torch.get_num_threads()
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _encoded(document: dict[str, Any]) -> bytes:
    import json

    return (json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()


def _print(out: Any, document: dict[str, Any], folder: Path) -> None:
    from rich.text import Text

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
        f"figures and results.json: {folder}",
    )
    for line in lines:
        out.print(Text(line), soft_wrap=True)


def _methods(document: dict[str, Any]) -> Any:
    table = _table("method", "largest error", "mean error", "entropy on data", "far away")
    for row in document["methods"]:
        numbers = ("largest_error", "mean_error", "entropy_on_the_data", "entropy_far_away")
        table.add_row(row["method"], *(f"{row[key]:.4f}" for key in numbers))
    return table


def _rays(document: dict[str, Any]) -> Any:
    table = _table("method", "probability", "limit", "difference", "standard error")
    for ray in document["rays"]:
        table.add_row(f"x = ({ray['direction'][0]:g}, {ray['direction'][1]:g})", style="bold")
        for row in ray["methods"]:
            error = f"{ray['monte_carlo_error']:.1e}" if "Monte Carlo" in row["method"] else ""
            difference = f"{abs(row['probability'] - row['limit']):.1e}"
            table.add_row(row["method"], f"{row['probability']:.6f}", f"{row['limit']:.6f}", difference, error)
    return table


def _parts(document: dict[str, Any]) -> Any:
    table = _table("q", "log joint", "entropy", "ELBO", "KL", "ELBO + KL")
    for row in document["decomposition"]:
        numbers = ("expected_log_joint", "entropy", "elbo", "divergence")
        table.add_row(row["name"], *(f"{row[key]:.4f}" for key in numbers), f"{row['sum']:.7f}")
    return table


def _table(first: str, *numbers: str) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(first, no_wrap=True)
    for heading in numbers:
        table.add_column(heading, justify="right")
    return table
