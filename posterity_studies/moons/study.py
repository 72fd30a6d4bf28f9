"""The study: means and intervals over seeds, its tables and its numbers as JSON."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from posterity.cli.frame.output import table
from posterity.inference.callbacks import tracked
from posterity_studies.frame import remark, title
from posterity_studies.moons import fits as moon_fits
from posterity_studies.moons.fits import Fit, Seed, fits
from posterity_studies.options import Report, Settings, silent

SEEDS = 5
QUANTILE = 2.7764451  # 0.975 of Student's t with SEEDS - 1 degrees of freedom
NOTHING = 1e-6  # nats: the order of entropies below it means nothing
METRICS = {
    "test_nll": "test NLL",
    "nll_minus_map": "test NLL minus MAP's",
    "calibration_error": "ECE",
    "test_accuracy": "accuracy",
    "entropy_on_the_data": "entropy on the data",
    "entropy_on_the_ring": "entropy far away",
    "ring_at_least_map": "part of the ring at or above MAP",
}


@dataclass(frozen=True)
class Interval:
    """A mean over seeds with its 95 % interval by Student's t, and the value of each seed."""

    mean: float
    lower: float
    upper: float
    values: tuple[float, ...]

    @property
    def half(self) -> float:
        """Half the width of the interval."""
        return 0.5 * (self.upper - self.lower)


@dataclass(frozen=True, eq=False)
class Study:
    """The results: the seeds, and the rows and fits of each."""

    seeds: tuple[int, ...]
    found: tuple[Seed, ...]

    def intervals(self) -> dict[str, dict[str, Interval]]:
        """Each metric of each method, over the seeds."""
        return {
            name: {
                metric: interval([_values(seed.fits[name], seed.fits["MAP"])[metric] for seed in self.found])
                for metric in METRICS
            }
            for name in self.found[0].fits
        }

    def document(self) -> dict[str, Any]:
        """Return all numbers of the study as JSON."""
        methods = moon_fits.methods()
        return {
            "seeds": list(self.seeds),
            "rows": moon_fits.ROWS,
            "noise": moon_fits.NOISE,
            "hidden": [moon_fits.HIDDEN, moon_fits.HIDDEN],
            "rate": moon_fits.RATE,
            "draws": moon_fits.DRAWS,
            "ring": moon_fits.RING,
            "interval": "mean over seeds, 95 % by Student's t",
            "methods": [
                {
                    "method": name,
                    "stages": [repr(stage) for stage in methods[name]],
                    **{
                        metric: {**asdict(interval), "values": list(interval.values)}
                        for metric, interval in metrics.items()
                    },
                }
                for name, metrics in self.intervals().items()
            ],
        }


def run(settings: Settings, folder: Path | None = None, report: Report = silent) -> Study:
    """Run the study on SEEDS seeds from `settings.seed` on; maps are computed for the first."""
    report("computing: five seeds, seven methods each")
    seeds = tuple(range(settings.seed, settings.seed + SEEDS))
    each = (fits(seed, with_maps=seed == seeds[0], report=report) for seed in tracked(seeds, "seeds"))
    return Study(seeds, tuple(each))


def interval(values: Sequence[float]) -> Interval:
    """The mean of SEEDS values and its interval.

    >>> found = interval([1.0, 2.0, 3.0, 4.0, 5.0])
    >>> found.mean, round(found.half, 4)
    (3.0, 1.9632)
    """
    mean, half = fmean(values), QUANTILE * stdev(values) / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half, tuple(values))


def _values(fit: Fit, mode: Fit) -> dict[str, float]:
    return {
        "test_nll": fit.test_nll,
        "nll_minus_map": fit.test_nll - mode.test_nll,
        "calibration_error": fit.calibration_error,
        "test_accuracy": fit.test_accuracy,
        "entropy_on_the_data": float(fit.data_entropy.mean()),
        "entropy_on_the_ring": float(fit.ring_entropy.mean()),
        "ring_at_least_map": float((fit.ring_entropy >= mode.ring_entropy - NOTHING).double().mean()),
    }


def show(out: Any, study: Study) -> None:
    """Print the tables."""
    document = study.document()
    title(out, f"Two moons, {document['rows']} rows, {len(document['seeds'])} seeds")
    rows = table("method", "test NLL", "ECE", "on data", "far away", wrap=False)
    for row in document["methods"]:
        keys = ("test_nll", "calibration_error", "entropy_on_the_data", "entropy_on_the_ring")
        halves = (0.5 * (row[key]["upper"] - row[key]["lower"]) for key in keys)
        rows.add_row(
            row["method"], *(f"{row[key]['mean']:.3f}±{half:.3f}" for key, half in zip(keys, halves, strict=True))
        )
    out.print(rows)
    remark(
        out,
        "Mean and half a 95 % interval over seeds. On data, far away: entropy of the label in nats, at training "
        f"rows and on a circle of radius {document['ring']:g}.",
    )
