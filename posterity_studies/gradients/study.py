"""The study: its run, its tables and its numbers as JSON."""

from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from posterity.cli.frame.output import table
from posterity.report.numbers import number
from posterity_studies.frame import remark, title
from posterity_studies.gradients import example, network
from posterity_studies.gradients.example import ROUNDING
from posterity_studies.options import Report, Settings, silent


@dataclass(frozen=True)
class Study:
    """Variances of gradients: of one weight against exact values, and of a small network."""

    seed: int
    example: tuple[example.Row, ...]
    network: tuple[network.Row, ...]

    def document(self) -> dict[str, Any]:
        """Return all numbers of the study as JSON."""
        return {
            "seed": self.seed,
            "variances_are": "of one estimate times the passes through the data that it takes",
            "one_weight": {
                "q": {"mean": example.MEAN, "scale": example.SCALE},
                "samples": example.SAMPLES,
                "estimators": [asdict(row) for row in self.example],
            },
            "network": {
                "sizes": [2, network.HIDDEN, 2],
                "rows": network.ROWS,
                "repeats": network.REPEATS,
                "estimators": [asdict(row) for row in self.network],
            },
        }


PARTS = (0.1, 5.7, 0.8)


def run(settings: Settings, folder: Path | None = None, report: Report = silent) -> Study:
    """Run the study; the seed determines all random numbers."""
    seed = settings.seed
    report("one weight")
    one = tuple(example.example(seed))
    report("a small network before and after training")
    return Study(seed, one, tuple(network.network(seed)))


def show(out: Any, study: Study) -> None:
    """Print the tables."""
    title(out, "One weight, q = N(0.7, 0.4²): variance of the gradient of E f(w) + H(q)")
    rows = table("estimator", "in mean", "exact", "in scale", "exact", wrap=False)
    for function, part in groupby(study.example, lambda row: row.function):
        rows.add_row(f"f = {function}", style="bold")
        for row in part:
            numbers = []
            for variance in (row.mean, row.scale):
                assert variance.exact is not None
                numbers += [str(variance), number(variance.exact, 3) if variance.exact > ROUNDING else "0"]
            rows.add_row(f"  {row.estimator}", *numbers)
    out.print(rows)
    title(out, "Small network, all weights together: variance of the gradient of the ELBO")
    rows = table("estimator", "in the means", "in the scales")
    for when, estimates in groupby(study.network, lambda row: row.when):
        rows.add_row(f"q {when}", style="bold")
        for estimate in estimates:
            rows.add_row(f"  {estimate.estimator}", str(estimate.mean), str(estimate.scale))
    out.print(rows)
    remark(out, "± standard error. An estimate from K passes through the data counts K times its variance.")
