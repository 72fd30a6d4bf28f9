"""The study as a whole: which fits are missing, the fits, and the numbers as one document."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from posterity.datasets.uci import num_splits
from posterity.inference.sweep import Result
from posterity_studies.hyperparameters.recipes import DATA_SETS, NOISE_SCALES, PRIOR_SCALES, RECIPES, default_settings
from posterity_studies.hyperparameters.runs import EM, GRID, Cell, fit_all, stored
from posterity_studies.hyperparameters.summary import Comparison, comparisons
from posterity_studies.uci.protocol import Settings, check_choices


@dataclass(frozen=True)
class Study:
    """All that the study found: for each data set, approximation and split the results of EM and of the grid."""

    settings: Settings
    results: tuple[Result[Cell], ...]

    @property
    def comparisons(self) -> list[Comparison]:
        """One for each data set and approximation."""
        return comparisons(self.results)

    def notes(self) -> list[str]:
        """A sentence on each comparison."""
        return [one.note() for one in self.comparisons]

    def document(self) -> dict[str, Any]:
        """Every number of the study, ready for JSON."""
        return {
            "settings": self.settings.config(),
            "prior_scales": list(PRIOR_SCALES),
            "noise_scales": list(NOISE_SCALES),
            "comparisons": [asdict(one) for one in self.comparisons],
            "fits": [{**asdict(one.cell), **one.scores, "seconds": one.seconds} for one in self.results],
            "notes": self.notes(),
        }


def hyperparameters(
    data_sets: Sequence[str] = DATA_SETS,
    methods: Sequence[str] = ("laplace",),
    *,
    folder: Path,
    splits: int | None = None,
    settings: Settings | None = None,
    jobs: int = 1,
    report: Callable[[str], None] = lambda line: None,
) -> Study:
    """Run the study, or the part of it that `folder` does not hold yet.

    `splits` takes the first so many of each data set (None: all), `jobs` is the number of processes, and `report`
    is told a line about each fit. Results that were made with other settings are refused.
    """
    settings = settings or default_settings()
    check(data_sets, methods, splits, jobs)
    cells = [
        Cell(name, method, split, part)
        for name in dict.fromkeys(data_sets)
        for method in dict.fromkeys(methods)
        for split in range(min(splits or num_splits(name), num_splits(name)))
        for part in (EM, GRID)
    ]
    found = {result.cell: result for result in stored(cells, folder, settings)}
    missing = [cell for cell in cells if cell not in found]
    if found:
        report(f"{len(found)} of {len(cells)} results are there already")
    for count, result in enumerate(fit_all(missing, folder, settings, jobs), start=1):
        found[result.cell] = result
        report(f"{count}/{len(missing)} {_progress(result)}")
    return Study(settings, tuple(found[cell] for cell in cells))


def check(data_sets: Sequence[str], methods: Sequence[str], splits: int | None, jobs: int) -> None:
    """ValueError at a data set, an approximation or a number that the study cannot use."""
    check_choices(data_sets, methods, tuple(RECIPES), splits, jobs)


def _progress(result: Result[Cell]) -> str:
    scores = result.scores
    if result.cell.part == EM:
        said = f"NLL {scores['test_nll']:.4g}, prior {scores['prior_scale']:.3g}, noise {scores['noise_scale']:.3g}"
    else:
        said = f"best NLL {min(scores.values()):.4g}"
    return f"{result.cell}: {said}, {result.seconds:.1f} s"
