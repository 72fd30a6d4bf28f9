"""The study: fits of all widths, means over seeds, the best temperatures, tables and JSON."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from posterity.cli.frame.output import table
from posterity.inference import Method, Task, plan
from posterity.inference.run import Trace
from posterity.inference.sweep import Result, Sweep
from posterity.inference.task import Outcome, stored
from posterity.methods import SGHMC
from posterity.model import Joint
from posterity.model.data import TensorData, as_data
from posterity.numerics.random import Key
from posterity.posteriors import Point, Posterior
from posterity.storage import Part
from posterity_studies.frame import notes, remark, title
from posterity_studies.grids import nearest, over_seeds, row_as_json
from posterity_studies.options import Report, silent
from posterity_studies.rows import depends_on, own_orders
from posterity_studies.temperature import cold
from posterity_studies.temperature.cold import ColdCell, ColdStudy, sampler_temperatures
from posterity_studies.temperature.problem import (
    LEARNT,
    Problem,
    Rows,
    cell_file,
    described,
    fits,
    problem,
    read,
    scores,
)
from posterity_studies.temperature.settings import Settings


@dataclass(frozen=True)
class Cell:
    """One fit: a width, eta and a seed."""

    width: int | None
    eta: float
    seed: int

    def path(self, folder: Path) -> Path:
        """Return its file in the folder of the study."""
        return cell_file(folder / "runs", self.width, f"eta-{self.eta:.12g}", self.seed)

    @property
    def temperature(self) -> float:
        """The temperature eta."""
        return self.eta

    def __str__(self) -> str:
        width = "" if self.width is None else f"width {self.width}, "
        return f"{width}eta {self.eta:.4g}, seed {self.seed}"


Fit = TypeVar("Fit", Cell, ColdCell)


@dataclass(frozen=True, eq=False)
class Runs(Sweep[Fit]):
    """The fits of one width, or the chains of a cold posterior, stored or to be run."""

    kind: type[Fit]

    problem: Problem
    folder: Path
    settings: Settings
    report: Callable[[str], None]
    fingerprint: str

    @property
    def name(self) -> str:
        return "" if self.problem.width is None else f"width {self.problem.width}"

    def cells(self) -> list[Fit]:
        """Return all cells of the width, by seed and temperature."""
        settings, problem = self.settings, self.problem
        temperatures = settings.temperatures(problem.num_data, problem.units)
        return [self.kind(problem.width, each, seed) for seed in range(settings.all_seeds) for each in temperatures]

    def identity(self, cell: Fit) -> Part:
        how = {"inference": self._method([cell]), "training rows": self.fingerprint}
        if self.kind is ColdCell:
            how["search"] = self.settings.search(self.problem.num_data)
        return depends_on(cell, self.settings, **how)

    def room(self, cells: Sequence[Fit]) -> bool:
        return plan(self._method(cells), self._joint(cells), self.problem.rows.train.pair).fits

    def task(self, cells: Sequence[Fit]) -> Task:
        rows, key = as_data(self.problem.rows.train.pair), Key(self.settings.seed).fold("temperature")
        assert isinstance(rows, TensorData)
        seeds = [cell.seed for cell in cells]
        start = self.problem.start(seeds, key.fold("start"))
        if self.kind is ColdCell:
            start = self._modes(seeds, rows, key)
        orders = own_orders(rows, seeds)
        return Task(str(cells[0]), self._method(cells), self._joint(cells), orders, start, seed=key.seed)

    def _modes(self, seeds: Sequence[int], rows: TensorData, key: Key) -> Tensor:
        """Return the mode that MAP reaches from the first weights of each seed, (P,) or (seeds, P).

        They are stored: a search on a GPU has other last bits when it is made again, and chains could not go on.
        """
        own = list(dict.fromkeys(seeds))
        start, orders = self.problem.start(own, key.fold("start")), own_orders(rows, own)
        method = self.settings.search(self.problem.num_data)
        task = Task("mode", method, self.problem.joint, orders, start, seed=key.seed)
        path = self.folder / "runs" / "cold" / f"modes {self.name}".strip() / "-".join(map(str, own))
        outcome = stored(task, path)
        if outcome is None:
            outcome = Outcome(task.name, *task.run())
            outcome.save(task, path)
        assert isinstance(outcome.posterior, Point)
        theta = outcome.posterior.theta.reshape(len(own), -1)[[own.index(seed) for seed in seeds]]
        return theta[0] if len(seeds) == 1 else theta

    def _method(self, cells: Sequence[Fit]) -> Method:
        return self.settings.inference(self.problem.num_data, len(cells))

    def _joint(self, cells: Sequence[Fit]) -> Joint:
        return self.problem.tempered([cell.temperature for cell in cells], cold=self.kind is ColdCell)

    def recorded(self, trace: Trace, index: int) -> dict[str, float]:
        method = self.settings.inference(self.problem.num_data)
        return sampler_temperatures(trace, index, method.warmup) if isinstance(method, SGHMC) else {}

    def scores(self, cell: Fit, posterior: Posterior) -> dict[str, float]:
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


@dataclass(frozen=True)
class Width:
    """A width: its number of units N, the etas of its fits, ascending, and the mean sigma before the first step."""

    width: int | None
    units: int
    etas: tuple[float, ...]
    start_sigma: float | None = None


@dataclass(frozen=True)
class Spread:
    """The range of mean accuracies of some widths, and whether all of them have learnt something."""

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
    """The results: p, the classes, the widths, a result for each fit, and the fits that diverged."""

    settings: Settings
    num_data: int
    held_out: int
    classes: int
    widths: tuple[Width, ...]
    results: tuple[Result[Cell], ...]
    failed: tuple[Cell, ...] = ()

    def rows(self, width: Width) -> list[Row]:
        """Return a row for each temperature of a width that has fits, ascending."""
        results = []
        for eta in width.etas:
            values = [
                result.scores for result in self.results if (result.cell.width, result.cell.eta) == (width.width, eta)
            ]
            if values:
                scores = over_seeds(values)
                tau = eta * width.units / self.num_data
                results.append(Row(width.width, width.units, eta, tau, len(values), scores))
        return results

    def row(self, width: Width, eta: float) -> Row | None:
        """Return the row at a temperature, up to rounding."""
        value = nearest(width.etas, eta)
        return next((row for row in self.rows(width) if row.eta == value), None)

    def best(self, width: Width) -> Row | None:
        """Return the row with the lowest mean NLL on held-out training rows; None without held-out rows."""
        rows = [row for row in self.rows(width) if "held_out_nll" in row.scores]
        return min(rows, key=lambda row: row.scores["held_out_nll"][0], default=None)

    def spread(self) -> dict[float, Spread]:
        """Return the range of the mean accuracies of wide networks by tau; empty for fewer than two."""
        least = self.settings.architecture.wide
        wide = [width for width in self.widths if width.width is not None and width.width >= least]
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
        """Return the results in a few lines."""
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
            least = self.settings.architecture.wide
            lines.append(
                f"at equal tau mean accuracies of {f'widths from {least} on' if least else 'all widths'} differ by "
                f"{100 * max(gap.accuracy for gap in spread.values()):.2f} points at most"
                + (f", and by {100 * max(learnt):.2f} where all have learnt something" if learnt else "")
            )
        lines += [f"{cell}: diverged, no result" for cell in self.failed]
        return lines

    def document(self) -> dict[str, Any]:
        """Return all numbers of the study as JSON."""
        spread = self.spread()
        best = [(width, self.best(width)) for width in self.widths]
        bayes = [(width, self.row(width, 1.0)) for width in self.widths]
        return {
            **described(self),
            "units_are": self.settings.architecture.units,
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
                "widths_from": self.settings.architecture.wide,
                "by_tau": [{"tau": tau, **asdict(gap)} for tau, gap in spread.items()],
                "largest": max((gap.accuracy for gap in spread.values()), default=None),
                "largest_where_all_have_learnt": max(
                    (gap.accuracy for gap in spread.values() if gap.learnt), default=None
                ),
                "learnt_means": f"NLL below {LEARNT} log K",
            },
            **fits(self),
        }


def run(settings: Settings, folder: Path, report: Report = silent, rows: Rows | None = None) -> Study | ColdStudy:
    """Run the study, or the part of it that `folder` does not hold yet; `report` gets a line about each fit.

    `rows` are what `read` gives, which is called without them. Temperatures and seeds of a width train together, as
    members or chains, in groups for which there is memory.
    """
    rows = read(settings) if rows is None else rows
    fingerprint = as_data(rows.train.pair).fingerprint()
    held_out = 0 if rows.held_out is None else len(rows.held_out)
    facts = (settings, len(rows.train), held_out, rows.classes)
    problems = [problem(width, rows, settings) for width in settings.all_widths]
    if settings.cold:
        chains = Runs(ColdCell, problems[0], folder, settings, report, fingerprint)
        sampled, lost = chains.results(chains.cells())
        return ColdStudy(*facts, problems[0].units, tuple(sampled), tuple(lost))
    widths: list[Width] = []
    results: list[Result[Cell]] = []
    failed: list[Cell] = []
    for own in problems:
        etas = settings.temperatures(own.num_data, own.units)
        rule = None if settings.method_name == "sghmc" else settings.architecture.initial_scales
        widths.append(Width(own.width, own.units, etas, None if rule is None else own.start_sigma(rule)))
        runs = Runs(Cell, own, folder, settings, report, fingerprint)
        result, diverged = runs.results(runs.cells())
        results += result
        failed += diverged
    return Study(*facts, tuple(widths), tuple(results), tuple(failed))


def show(out: Any, study: Study | ColdStudy) -> None:
    """Print the tables."""
    if isinstance(study, ColdStudy):
        cold.show(out, study)
        return
    settings = study.settings
    for width in study.widths:
        name = settings.architecture.label + ("" if width.width is None else f", width {width.width}")
        title(out, f"{settings.data}, {name}: {width.units:,} {settings.architecture.units}")
        rows = table("eta", "tau", *METRICS.values(), "sigma")
        for row in study.rows(width):
            numbers = [f"{row.scores[key][0]:.4f}" for key in METRICS]
            rows.add_row(f"{row.eta:.2g}", f"{row.tau:.2g}", *numbers, f"{row.scores['mean_sigma'][0]:.3g}")
        out.print(rows)
    seeds = f"Means over {settings.all_seeds} seeds" if settings.all_seeds > 1 else "One seed"
    starts = ", ".join(f"{width.start_sigma:.3g}" for width in study.widths if width.start_sigma is not None)
    began = f", at the start {starts}" if starts else ""
    remark(out, f"{seeds}, test rows; sigma: mean standard deviation of a weight{began}.")
    notes(out, study.notes())
