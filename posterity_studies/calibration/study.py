"""The study as a whole: methods on models, and their numbers as one document."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from posterity.errors import positive_whole, unknown
from posterity_studies.calibration.calibrate import Calibration, calibrate, sized
from posterity_studies.calibration.models import MODELS
from posterity_studies.calibration.ranks import number_of_bins
from posterity_studies.calibration.recipes import EXACT, RECIPES

THRESHOLD = 1e-4  # p-values below it say that a method is not calibrated
DRAWS = 31


@dataclass(frozen=True, eq=False)
class Row:
    """What was found of a method on a model; `settings` tell the method's stages."""

    model: str
    method: str
    settings: tuple[str, ...]
    found: Calibration

    @property
    def worst(self) -> str:
        """The test quantity of the smallest p-value."""
        return min(self.found.p_values, key=self.found.p_values.__getitem__)

    @property
    def passes(self) -> bool:
        """Whether every p-value is above the threshold."""
        return self.found.smallest > THRESHOLD


@dataclass(frozen=True, eq=False)
class Study:
    """All that was found, by model and method."""

    seed: int
    rows: tuple[Row, ...]

    def document(self) -> dict[str, Any]:
        """Every number of the study, ready for JSON."""
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


def check(models: Sequence[str], methods: Sequence[str], replicates: int, draws: int) -> None:
    """A ValueError for names that are not there, and numbers that cannot be."""
    for kind, names, known in (("model", models, MODELS), ("method", methods, RECIPES)):
        if not names:
            raise ValueError(f"No {kind} is named. Give some of {', '.join(known)}.")
        for name in names:
            if name not in known:
                raise ValueError(unknown(kind, name, known))
    positive_whole("--replicates", replicates)
    positive_whole("--draws", draws)
    number_of_bins(replicates, draws)


def calibration(
    models: Sequence[str] = tuple(MODELS),
    methods: Sequence[str] = EXACT,
    replicates: int = 1000,
    draws: int = DRAWS,
    seed: int = 0,
    report: Callable[[str], None] = lambda line: None,
) -> Study:
    """Calibrate every method on every model; the same parameters and data for all methods."""
    check(models, methods, replicates, draws)
    rows = []
    for model in models:
        for method in methods:
            stages = RECIPES[method](model)
            found = calibrate(stages, MODELS[model](), replicates, draws, seed)
            rows.append(Row(model, method, tuple(map(repr, sized(stages, replicates, draws))), found))
            report(f"{model}, {method}: smallest p {found.smallest:.2g} ({rows[-1].worst})")
    return Study(seed, tuple(rows))
