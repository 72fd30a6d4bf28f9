"""Simulation-based calibration of methods on models: the methods by name, the study, and its tables."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import groupby, product
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rich.text import Text

from posterity.cli.frame.output import table
from posterity.inference import Method
from posterity.inference.callbacks import tracked
from posterity.methods import HMC, MALA, MAP, NUTS, SGLD, Langevin, Laplace, MeanField, Metropolis
from posterity.optim.optimizer import Adam
from posterity.optim.schedules import Cosine
from posterity_studies.calibration.calibrate import MODELS, Calibration, calibrate, sized
from posterity_studies.calibration.settings import EXACT, Settings
from posterity_studies.frame import add_heading, remark, title
from posterity_studies.options import Report, silent

# Thinning, so that kept draws are nearly independent: chains of networks move slowly between modes.
THIN = {"linear": 1, "logistic": 1, "network": 4}
# Step size of unadjusted Langevin dynamics: large enough for a visible bias, and not yet divergent.
LARGE = {"linear": 0.01, "logistic": 0.3, "network": 0.02}
RECIPES: Mapping[str, Callable[[str], tuple[Method, ...]]] = MappingProxyType(
    {
        "nuts": lambda model: (NUTS(warmup=300, thin=4, max_depth=6),),
        "hmc": lambda model: (HMC(warmup=300, thin=4 * THIN[model], steps=8),),
        "mala": lambda model: (MALA(warmup=500, thin=25 * THIN[model]),),
        "metropolis": lambda model: (Metropolis(warmup=500, thin=60 * THIN[model]),),
        "langevin": lambda model: (Langevin(warmup=500, thin=25 * THIN[model], step_size=LARGE[model]),),
        "sgld": lambda model: (SGLD(warmup=500, thin=25 * THIN[model], step_size=LARGE[model], batch_size=5),),
        "mean-field": lambda model: (MeanField(2000, None, Adam(0.02), Cosine()),),
        "laplace": lambda model: (MAP(2000, None, Adam(0.02), Cosine()), Laplace(tuning=None)),
    }
)
THRESHOLD = 1e-4  # p-values below it count as miscalibration


@dataclass(frozen=True, eq=False)
class Row:
    """The result of a method on a model; `settings` describe the stages of the method."""

    model: str
    method: str
    settings: tuple[str, ...]
    found: Calibration

    @property
    def worst(self) -> str:
        """The test quantity with the smallest p-value."""
        return min(self.found.p_values, key=self.found.p_values.__getitem__)

    @property
    def passes(self) -> bool:
        """Whether every p-value is above the threshold."""
        return self.found.smallest > THRESHOLD


@dataclass(frozen=True, eq=False)
class Study:
    """The results by model and method."""

    seed: int
    rows: tuple[Row, ...]

    def document(self) -> dict[str, Any]:
        """Return all numbers of the study as JSON."""
        return {
            "seed": self.seed,
            "threshold": THRESHOLD,
            "models": {name: MODELS[name].__doc__ for name in dict.fromkeys(row.model for row in self.rows)},
            "results": [
                {
                    "model": row.model,
                    "method": row.method,
                    "exact": row.method in EXACT,
                    "passes": row.passes,
                    "stages": list(row.settings),
                    **row.found.document(),
                }
                for row in self.rows
            ],
        }


def run(settings: Settings, folder: Path | None = None, report: Report = silent) -> Study:
    """Calibrate every method on every model; the same parameters and data for all methods."""
    replicates, draws = settings.replicates, settings.draws
    rows = []
    for model, method in tracked([*product(settings.models, settings.methods)], "methods"):
        stages = RECIPES[method](model)
        result = calibrate(stages, MODELS[model](), replicates, draws, settings.seed)
        rows.append(Row(model, method, tuple(map(repr, sized(stages, replicates, draws))), result))
        report(f"{model}, {method}: smallest p {result.smallest:.2g} ({rows[-1].worst})")
    return Study(settings.seed, tuple(rows))


def show(out: Any, study: Study) -> None:
    """Print the tables."""
    first = study.rows[0].found
    title(out, f"Ranks of true values among {first.draws} draws, {first.replicates:,} replicates")
    rows = table("", "smallest p", "of", "lag 1", "accepted", "", wrap=False)
    for model, part in groupby(study.rows, lambda row: row.model):
        add_heading(rows, model)
        for row in part:
            calibrated = row.found
            rows.add_row(
                f"  {row.method}",
                f"{calibrated.smallest:.2g}",
                row.worst,
                f"{max(calibrated.autocorrelations.values()):.2f}",
                "" if calibrated.accept is None else f"{calibrated.accept:.2f}",
                Text("passes") if row.passes else Text("fails", "red"),
            )
    out.print(rows)
    remark(
        out,
        f"p: of uniform ranks, by chi-square; fails: below {THRESHOLD:g}. Lag 1: largest correlation of "
        "neighbouring draws.",
    )
