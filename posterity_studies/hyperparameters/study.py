"""The study as a whole: which fits are missing, the fits, and the numbers as one document."""

import os
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from posterity.cli.frame.output import table
from posterity.datasets.uci import num_splits
from posterity_studies.frame import add_heading, notes, remark, title
from posterity_studies.hyperparameters.recipes import NOISE_SCALES, PRIOR_SCALES
from posterity_studies.hyperparameters.runs import EM, GRID, Cell, fit_all, stored
from posterity_studies.hyperparameters.settings import Settings
from posterity_studies.hyperparameters.summary import Comparison, comparisons
from posterity_studies.options import Report, silent
from posterity_studies.results import Result


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


def run(settings: Settings, folder: Path, report: Report = silent) -> Study:
    """Run the study, or the part of it that `folder` does not hold yet.

    `report` is told a line about each fit. Results that were made with other settings are refused.
    """
    jobs = settings.jobs or os.cpu_count() or 1
    cells = [
        Cell(name, method, split, part)
        for name in dict.fromkeys(settings.datasets)
        for method in dict.fromkeys(settings.methods)
        for split in range(min(settings.splits or num_splits(name), num_splits(name)))
        for part in (EM, GRID)
    ]
    done = {result.cell: result for result in stored(cells, folder, settings)}
    missing = [cell for cell in cells if cell not in done]
    if done:
        report(f"{len(done)} of {len(cells)} results are there already")
    for count, result in enumerate(fit_all(missing, folder, settings, jobs), start=1):
        done[result.cell] = result
        report(f"{count}/{len(missing)} {_progress(result)}")
    return Study(settings, tuple(done[cell] for cell in cells))


def _progress(result: Result[Cell]) -> str:
    scores = result.scores
    if result.cell.part == EM:
        said = f"NLL {scores['test_nll']:.4g}, prior {scores['prior_scale']:.3g}, noise {scores['noise_scale']:.3g}"
    else:
        said = f"best NLL {min(scores.values()):.4g}"
    return f"{result.cell}: {said}, {result.seconds:.1f} s"


def show(out: Any, study: Study) -> None:
    """Print the tables."""
    title(out, "Prior and noise by variational EM, against the best of a grid")
    rows = table("", "best of grid", "variational EM", "difference", "splits", wrap=False)
    for data_set, part in groupby(study.comparisons, lambda one: one.data_set):
        add_heading(rows, data_set)
        for one in part:
            rows.add_row(f"  {one.method}", str(one.best), str(one.em), str(one.difference), str(one.splits))
    out.print(rows)
    remark(out, "Test NLL in units of the target, mean ± standard error over splits.")
    notes(out, study.notes())
