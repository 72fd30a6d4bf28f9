"""Cold posteriors: scores of SGHMC against T, and the sampler's own temperatures."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posterity.cli.frame.output import table
from posterity.inference.run import Trace
from posterity.inference.sweep import Result
from posterity_studies.frame import notes, remark, title
from posterity_studies.grids import over_seeds, row_as_json
from posterity_studies.temperature.problem import LEARNT, cell_file, described, fits
from posterity_studies.temperature.settings import Settings

KINDS = ("kinetic", "configurational")
OFF = 0.1  # largest accepted deviation of a sampler's temperature from 1
COLUMNS = {
    "accuracy": "acc.",
    "nll": "NLL",
    "gibbs_nll": "Gibbs",
    "ece": "ECE",
    "confidence": "conf.",
    "ood_auroc": "AUROC",
    "kinetic": "kin.",
    "configurational": "config.",
}


@dataclass(frozen=True)
class ColdCell:
    """One chain: a width, T and a seed."""

    width: int | None
    temperature: float
    seed: int

    def path(self, folder: Path) -> Path:
        """Return its file in the folder of the study."""
        return cell_file(folder / "runs" / "cold", self.width, f"T-{self.temperature:.12g}", self.seed)

    def __str__(self) -> str:
        return f"T {self.temperature:.4g}, seed {self.seed}"


def sampler_temperatures(trace: Trace, chain: int, warmup: int) -> dict[str, float]:
    """Return both temperatures of a chain, averaged over the steps after the warm-up; 1 is correct at any T."""
    return {kind: float(trace[f"{kind}_temperature"][warmup:, chain].double().mean()) for kind in KINDS}


@dataclass(frozen=True)
class ColdRow:
    """A T: mean and standard deviation (None for one seed) of each score over seeds, and which temperatures are off."""

    temperature: float
    seeds: int
    off: tuple[str, ...]
    scores: dict[str, tuple[float, float | None]]


@dataclass(frozen=True)
class ColdStudy:
    """The results: p, the classes, a result for each chain, and the chains that diverged."""

    settings: Settings
    num_data: int
    held_out: int
    classes: int
    units: int
    results: tuple[Result[ColdCell], ...]
    failed: tuple[ColdCell, ...] = ()

    def rows(self) -> list[ColdRow]:
        """Return a row for each T that has chains, ascending."""
        rows = []
        for temperature in sorted({result.cell.temperature for result in self.results}):
            values = [result.scores for result in self.results if result.cell.temperature == temperature]
            scores = over_seeds(values)
            off = tuple(kind for kind in KINDS if any(abs(each[kind] - 1.0) > OFF for each in values))
            rows.append(ColdRow(temperature, len(values), off, scores))
        return rows

    def notes(self) -> list[str]:
        """Return the results in a few lines."""
        rows = self.rows()
        lines = []
        bayes = next((row for row in rows if row.temperature == 1.0), None)
        trusted = [row for row in rows if not row.off]
        if trusted:
            best = min(trusted, key=lambda row: row.scores["nll"][0])
            lines.append(
                f"least test NLL of the chains at their temperature: {_scores(best)} at T = {best.temperature:.3g}"
                + ("" if bayes is None or bayes is best else f"; {_scores(bayes)} at T = 1")
            )
        guess = math.log(self.classes)
        for row in rows:
            if row.scores["nll"][0] >= LEARNT * guess:
                lines.append(
                    f"T = {row.temperature:.3g}: nothing is learnt, NLL {row.scores['nll'][0]:.3f} where a guess has "
                    f"{guess:.3f}: the prior outweighs the rows. Take more rows, or a larger prior variance"
                )
            if row.off:
                means = " and ".join(f"{kind} temperature {row.scores[kind][0]:.3g}" for kind in row.off)
                lines.append(
                    f"T = {row.temperature:.3g}: {means}, more than {100 * OFF:.0f} % from 1 in a chain: "
                    "its draws are not those of the density at T"
                )
        return lines + [f"{cell}: diverged, no result" for cell in self.failed]

    def document(self) -> dict[str, Any]:
        """Return all numbers of the study as JSON."""
        return {
            **described(self),
            "units": self.units,
            "density": "(likelihood x prior)^(1/T)",
            "search": repr(self.settings.search(self.num_data)),
            "sampler_temperatures": "means over the steps after the warm-up, divided by T: 1 is right",
            "rows": [{**row_as_json(row), "off": list(row.off)} for row in self.rows()],
            "best_by_held_out_nll": _best(self.rows()),
            **fits(self),
        }


def _scores(row: ColdRow) -> str:
    return f"NLL {row.scores['nll'][0]:.4f}, accuracy {row.scores['accuracy'][0]:.4f}"


def _best(rows: Sequence[ColdRow]) -> float | None:
    """Return the T with the lowest mean NLL on held-out training rows; None without held-out rows."""
    held = [row for row in rows if "held_out_nll" in row.scores]
    best = min(held, key=lambda row: row.scores["held_out_nll"][0], default=None)
    return None if best is None else best.temperature


def show(out: Any, study: ColdStudy) -> None:
    """Print the table."""
    settings, network, width = study.settings, study.settings.architecture, study.settings.all_widths[0]
    name = network.label + ("" if width is None else f", width {width}")
    title(out, f"{settings.data}, {name}: {study.units:,} {network.units}, cold posteriors by SGHMC")
    rows = table("T", *COLUMNS.values())
    for row in study.rows():
        rows.add_row(f"{row.temperature:.2g}", *[f"{row.scores[key][0]:.4f}" for key in COLUMNS])
    out.print(rows)
    seeds = f"Means over {settings.all_seeds} chains" if settings.all_seeds > 1 else "One chain"
    remark(out, f"{seeds}, test rows; kin. and config.: temperatures of the sampler, which should be 1 at every T.")
    notes(out, study.notes())
