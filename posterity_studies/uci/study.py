"""The study as a whole: which fits are missing, the fits, and the numbers as one document."""

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from posterity.cli.frame.output import table
from posterity.datasets.uci import num_splits
from posterity.inference.sweep import Result
from posterity_studies.frame import add_heading, notes, remark, title
from posterity_studies.options import Report, silent
from posterity_studies.uci.recipes import RECIPES
from posterity_studies.uci.runs import Cell, fit_all, stored
from posterity_studies.uci.settings import Settings
from posterity_studies.uci.summary import (
    COMPARED,
    FILE,
    GOAL,
    METRICS,
    PAIRS,
    Row,
    Value,
    at_least_as_good,
    find_published,
    own_rows,
    published_rows,
    reached,
    read_published,
)


@dataclass(frozen=True)
class Study:
    """All that the study found: a result for each data set, method and split, and what others published."""

    settings: Settings
    results: tuple[Result[Cell], ...]
    published: tuple[Value, ...]
    published_from: Path | None

    @property
    def data_sets(self) -> tuple[str, ...]:
        """The names of the data sets, in order."""
        return tuple(dict.fromkeys(result.cell.data_set for result in self.results))

    @property
    def rows(self) -> list[Row]:
        """Data set by data set, our methods and then the published ones to compare with."""
        own = own_rows(self.results)
        return [
            row
            for name in self.data_sets
            for row in (*(row for row in own if row.data_set == name), *published_rows(self.published, name))
        ]

    def notes(self) -> list[str]:
        """For each of our methods, a sentence on how its NLL compares with the published goal; or that none is here."""
        if self.published_from is None:
            return [f"{FILE} was not found where data sets are looked for: no published results to compare with."]
        rows, found = self.rows, []
        for label in dict.fromkeys(row.method for row in rows if not row.published):
            good, compared = at_least_as_good(rows, label)
            if compared:
                names = f" ({', '.join(good)})" if good else ""
                found.append(
                    f"{label}: NLL at least as good as {COMPARED[GOAL]} on {len(good)} of {len(compared)}{names}"
                )
        return found + [line for name, goal in PAIRS.items() for line in self._reached(RECIPES[name].label, goal)]

    def _reached(self, label: str, goal: str) -> list[str]:
        """A sentence for each metric on where our method comes within a standard error of the one it follows."""
        found = []
        for metric, name in METRICS.items():
            good, compared = reached(self.rows, label, COMPARED[goal], metric)
            if compared:
                names = f" ({', '.join(good)})" if good else ""
                found.append(
                    f"{label}: {name} within one standard error of {COMPARED[goal]}, or better, on "
                    f"{len(good)} of {len(compared)}{names}"
                )
        return found

    def document(self) -> dict[str, Any]:
        """Every number of the study, ready for JSON."""
        return {
            "settings": self.settings.config(),
            "methods": [asdict(row) for row in own_rows(self.results)],
            "splits": [{**asdict(result.cell), **result.scores, "seconds": result.seconds} for result in self.results],
            "published": [asdict(value) for value in self.published],
            "published_from": None if self.published_from is None else self.published_from.name,
            "notes": self.notes(),
        }


def run(settings: Settings, folder: Path, report: Report = silent) -> Study:
    """Run the study, or the part of it that `folder` does not hold yet.

    `report` is told a line about each split. Results that were made with other settings are refused.
    """
    jobs = settings.jobs or os.cpu_count() or 1
    published_from = find_published()
    published = () if published_from is None else read_published(published_from, settings.datasets)
    cells = [
        Cell(name, method, split)
        for name in dict.fromkeys(settings.datasets)
        for split in range(min(settings.splits or num_splits(name), num_splits(name)))
        for method in dict.fromkeys(settings.methods)
    ]
    done = {result.cell: result for result in stored(cells, folder, settings)}
    missing = [cell for cell in cells if cell not in done]
    splits = dict.fromkeys((cell.data_set, cell.split) for cell in missing)
    if done:
        report(f"{len(done)} of {len(cells)} results are there already")
    for count, results in enumerate(fit_all(missing, folder, settings, jobs), start=1):
        done.update({result.cell: result for result in results})
        report(_progress(results, count, len(splits)))
    return Study(settings, tuple(done[cell] for cell in cells), published, published_from)


def _progress(results: Sequence[Result[Cell]], count: int, whole: int) -> str:
    cell = results[0].cell
    scores = ", ".join(
        f"{RECIPES[one.cell.method].label} NLL {one.scores['test_nll']:.4g} RMSE {one.scores['test_rmse']:.4g}"
        for one in results
    )
    return f"{count}/{whole} {cell.data_set} split {cell.split}: {scores}, {max(one.seconds for one in results):.1f} s"


def show(out: Any, study: Study) -> None:
    """Print the tables."""
    title(out, "Standard UCI regression splits, one hidden layer")
    rows = table("", *METRICS.values(), "splits", wrap=False)
    for data_set, part in groupby(study.rows, lambda row: row.data_set):
        add_heading(rows, data_set)
        for row in part:
            scores = (str(row.scores.get(metric, "")) for metric in METRICS)
            splits = "" if row.published else str(row.splits)
            rows.add_row(f"  {row.method}", *scores, splits, style="dim" if row.published else "")
    out.print(rows)
    remark(out, "Mean ± standard error over splits, in units of the target. Dim: published.")
    notes(out, study.notes())
