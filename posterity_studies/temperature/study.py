"""The study as a whole: fits of all widths, means over seeds, the best temperatures, and one document."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from posterity.cli.frame.output import table
from posterity.inference import Task, plan
from posterity.inference.sweep import Result, Sweep
from posterity.model.data import TensorData, as_data
from posterity.numerics.random import Key
from posterity.posteriors import Posterior
from posterity.report.files import processor
from posterity.storage import Part
from posterity_studies.frame import notes, remark, title
from posterity_studies.grids import mean_and_spread, nearest, row_as_json
from posterity_studies.options import Report, silent
from posterity_studies.rows import depends_on, own_orders
from posterity_studies.temperature.problem import Problem, Rows, describe_foreign, problem, read, scores
from posterity_studies.temperature.settings import Settings


@dataclass(frozen=True)
class Cell:
    """One fit: a width, eta and a seed."""

    width: int | None
    eta: float
    seed: int

    def path(self, folder: Path) -> Path:
        """Its file in the folder of the study."""
        width = "network" if self.width is None else f"width-{self.width}"
        return folder / "runs" / width / f"eta-{self.eta:.12g}" / f"seed-{self.seed}.json"

    def __str__(self) -> str:
        width = "" if self.width is None else f"width {self.width}, "
        return f"{width}eta {self.eta:.4g}, seed {self.seed}"


@dataclass(frozen=True, eq=False)
class Runs(Sweep[Cell]):
    """The fits of one width: those stored, and those to be made."""

    problem: Problem
    folder: Path
    settings: Settings
    report: Callable[[str], None]
    fingerprint: str

    @property
    def name(self) -> str:
        return "" if self.problem.width is None else f"width {self.problem.width}"

    def cells(self) -> list[Cell]:
        """All of the width, by seed and temperature."""
        etas = self.settings.temperatures(self.problem.num_data, self.problem.units)
        return [Cell(self.problem.width, eta, seed) for seed in range(self.settings.seeds) for eta in etas]

    def identity(self, cell: Cell) -> Part:
        method = self.settings.inference(self.problem.num_data)
        return depends_on(cell, self.settings, inference=method, **{"training rows": self.fingerprint})

    def room(self, cells: Sequence[Cell]) -> bool:
        joint = self.problem.tempered([cell.eta for cell in cells])
        return plan(self.settings.inference(self.problem.num_data), joint, self.problem.rows.train.pair).fits

    def task(self, cells: Sequence[Cell]) -> Task:
        rows, key = as_data(self.problem.rows.train.pair), Key(self.settings.seed).fold("temperature")
        assert isinstance(rows, TensorData)
        seeds = [cell.seed for cell in cells]
        return Task(
            str(cells[0]),
            self.settings.inference(self.problem.num_data),
            self.problem.tempered([cell.eta for cell in cells]),
            own_orders(rows, seeds),
            self.problem.start(seeds, key.fold("start")),
            seed=key.seed,
        )

    def scores(self, cell: Cell, posterior: Posterior) -> dict[str, float]:
        return scores(posterior, cell.seed, self.problem, self.settings)

    def summary(self, scores: dict[str, float]) -> str:
        return f"accuracy {scores['accuracy']:.4f}, NLL {scores['nll']:.4g}, confidence {scores['confidence']:.3f}"


METRICS = {
    "accuracy": "acc.",
    "nll": "NLL",
    "gibbs_nll": "Gibbs",
    "ece": "ECE",
    "confidence": "conf.",
    "ood_auroc": "AUROC",
}
LEARNT = 0.95  # of log K: above, labels are those of a few draws from nearly the prior, and accuracy is chance
WIDE = 200  # neurons from which widths are compared at equal tau


@dataclass(frozen=True)
class Width:
    """A width: its number of units N, and the etas of its fits, ascending."""

    width: int | None
    units: int
    etas: tuple[float, ...]


@dataclass(frozen=True)
class Spread:
    """The largest less the smallest mean accuracy of some widths, and whether all of them have learnt something."""

    accuracy: float
    learnt: bool


@dataclass(frozen=True)
class Row:
    """A width at a temperature: mean and standard deviation (None for one seed) of each score over seeds."""

    width: int | None
    units: int
    eta: float
    tau: float
    seeds: int
    scores: dict[str, tuple[float, float | None]]


@dataclass(frozen=True)
class Study:
    """All that the study found: p, the classes, the widths, a result for each fit, and the fits that diverged."""

    settings: Settings
    num_data: int
    held_out: int
    classes: int
    widths: tuple[Width, ...]
    results: tuple[Result[Cell], ...]
    failed: tuple[Cell, ...] = ()

    def rows(self, width: Width) -> list[Row]:
        """The temperatures of a width, ascending; those without a single fit left out."""
        results = []
        for eta in width.etas:
            values = [
                result.scores for result in self.results if (result.cell.width, result.cell.eta) == (width.width, eta)
            ]
            if values:
                scores = {key: mean_and_spread([scores[key] for scores in values]) for key in values[0]}
                tau = eta * width.units / self.num_data
                results.append(Row(width.width, width.units, eta, tau, len(values), scores))
        return results

    def row(self, width: Width, eta: float) -> Row | None:
        """The row at a temperature, up to rounding."""
        there = nearest(width.etas, eta)
        return next((row for row in self.rows(width) if row.eta == there), None)

    def best(self, width: Width) -> Row | None:
        """The temperature with the least mean NLL on held-out training rows; None where none are held out."""
        rows = [row for row in self.rows(width) if "held_out_nll" in row.scores]
        return min(rows, key=lambda row: row.scores["held_out_nll"][0], default=None)

    def spread(self) -> dict[float, Spread]:
        """By tau, how far the mean accuracies of the widths from 200 on lie apart; empty for fewer than two such."""
        wide = [width for width in self.widths if width.width is not None and width.width >= WIDE]
        results = {}
        for tau in self.settings.all_taus if len(wide) > 1 else ():
            rows = [self.row(width, tau * self.num_data / width.units) for width in wide]
            scores = [row.scores for row in rows if row is not None]
            if len(scores) == len(wide):
                accuracies = [score["accuracy"][0] for score in scores]
                learnt = all(score["nll"][0] < LEARNT * math.log(self.classes) for score in scores)
                results[tau] = Spread(max(accuracies) - min(accuracies), learnt)
        return results

    def notes(self) -> list[str]:
        """What the study shows, in a few lines."""
        lines = []
        for width in self.widths:
            name = "" if width.width is None else f"width {width.width}: "
            bayes, best = self.row(width, 1.0), self.best(width)
            words = [] if bayes is None else [f"accuracy at eta = 1 {bayes.scores['accuracy'][0]:.4f}"]
            if best is not None:
                words.append(
                    f"least held-out NLL at eta = {best.eta:.3g}, tau = {best.tau:.3g}: test accuracy "
                    f"{best.scores['accuracy'][0]:.4f}, NLL {best.scores['nll'][0]:.4f}"
                )
            lines.append(name + "; ".join(words))
        spread = self.spread()
        if spread:
            learnt = [gap.accuracy for gap in spread.values() if gap.learnt]
            lines.append(
                f"at equal tau mean accuracies of widths from {WIDE} on differ by "
                f"{100 * max(gap.accuracy for gap in spread.values()):.2f} points at most"
                + (f", and by {100 * max(learnt):.2f} where all have learnt something" if learnt else "")
            )
        lines += [f"{cell}: diverged, no result" for cell in self.failed]
        return lines

    def document(self) -> dict[str, Any]:
        """Every number of the study, ready for JSON."""
        settings, spread = self.settings, self.spread()
        best = [(width, self.best(width)) for width in self.widths]
        bayes = [(width, self.row(width, 1.0)) for width in self.widths]
        return {
            "settings": settings.config(),
            **processor(settings.device),
            "inference": repr(settings.inference(self.num_data)),
            "num_data": self.num_data,
            "held_out": self.held_out,
            "classes": self.classes,
            "units_are": settings.architecture.units,
            "foreign_rows": describe_foreign(settings.data, settings.foreign),
            "seeds_differ_in": "first weights, order of training rows, draws of predictions; not the noise of training",
            "widths": [{**asdict(width), "etas": list(width.etas)} for width in self.widths],
            "rows": [row_as_json(row) for width in self.widths for row in self.rows(width)],
            "best_by_held_out_nll": [
                {"width": width.width, "eta": row.eta, "tau": row.tau, "test": row_as_json(row)["scores"]}
                for width, row in best
                if row is not None
            ],
            "accuracy_at_eta_1": [
                {"width": width.width, "accuracy": row.scores["accuracy"][0]} for width, row in bayes if row is not None
            ],
            "accuracy_spread_at_equal_tau": {
                "widths_from": WIDE,
                "by_tau": [{"tau": tau, **asdict(gap)} for tau, gap in spread.items()],
                "largest": max((gap.accuracy for gap in spread.values()), default=None),
                "largest_where_all_have_learnt": max(
                    (gap.accuracy for gap in spread.values() if gap.learnt), default=None
                ),
                "learnt_means": f"NLL below {LEARNT} log K",
            },
            "fits": [{**asdict(result.cell), **result.scores, "seconds": result.seconds} for result in self.results],
            "diverged": [asdict(cell) for cell in self.failed],
            "notes": self.notes(),
        }


def run(settings: Settings, folder: Path, report: Report = silent, rows: Rows | None = None) -> Study:
    """Run the study, or the part of it that `folder` does not hold yet; `report` is told a line about each fit.

    `rows` are what `read` gives, which is called without them. Temperatures and seeds of a width train together, as
    members, in groups for which there is memory.
    """
    rows = read(settings) if rows is None else rows
    fingerprint = as_data(rows.train.pair).fingerprint()
    widths: list[Width] = []
    results: list[Result[Cell]] = []
    failed: list[Cell] = []
    for width in settings.all_widths:
        own = problem(width, rows, settings)
        widths.append(Width(width, own.units, settings.temperatures(own.num_data, own.units)))
        runs = Runs(own, folder, settings, report, fingerprint)
        most = None if settings.inference(own.num_data).traits.takes_members else 1
        result, lost = runs.results(runs.cells(), most)
        results += result
        failed += lost
    held_out = 0 if rows.held_out is None else len(rows.held_out)
    return Study(settings, len(rows.train), held_out, rows.classes, tuple(widths), tuple(results), tuple(failed))


def show(out: Any, study: Study) -> None:
    """Print the tables."""
    settings = study.settings
    for width in study.widths:
        name = settings.architecture.label + ("" if width.width is None else f", width {width.width}")
        title(out, f"{settings.data}, {name}: {width.units:,} {settings.architecture.units}")
        rows = table("eta", "tau", *METRICS.values(), "sigma")
        for row in study.rows(width):
            numbers = [f"{row.scores[key][0]:.4f}" for key in METRICS]
            rows.add_row(f"{row.eta:.2g}", f"{row.tau:.2g}", *numbers, f"{row.scores['mean_sigma'][0]:.3f}")
        out.print(rows)
    seeds = f"Means over {settings.seeds} seeds" if settings.seeds > 1 else "One seed"
    remark(out, f"{seeds}, test rows; sigma: mean standard deviation of a weight.")
    notes(out, study.notes())
