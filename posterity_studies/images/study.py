"""The study as a whole: fits, the choice of eta, means over seeds, and one document."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from posterity.cli.frame.output import table
from posterity.inference.sweep import Result
from posterity.posteriors import Posterior
from posterity.report.files import processor
from posterity_studies.frame import notes, remark, title
from posterity_studies.grids import mean_and_spread
from posterity_studies.images.protocol import NETWORKS, Images, read_images
from posterity_studies.images.runs import Cell, fit, start, stored
from posterity_studies.images.settings import Settings
from posterity_studies.options import Report, silent
from posterity_studies.results import with_error

METRICS = {"error": "error, %", "nll": "NLL", "ece": "ECE"}
WITHIN = 0.3  # points of error


@dataclass(frozen=True)
class Row:
    """A method on a network: mean and standard deviation over seeds of each score, the latter None for one seed."""

    network: str
    method: str
    eta: float | None
    seeds: int
    scores: dict[str, tuple[float, float | None]]


@dataclass(frozen=True)
class Study:
    """All that the study found: a result for each fit, and for each network the eta that was chosen."""

    settings: Settings
    results: tuple[Result[Cell], ...]
    chosen: dict[str, float]

    def grid(self, network: str) -> dict[float | None, Result[Cell]]:
        """The fits of the first seed by eta, those from which one was chosen; MAP under None."""
        found = (one for one in self.results if (one.cell.network, one.cell.seed) == (network, 0))
        return {one.cell.eta: one for one in found}

    def rows(self, network: str) -> list[Row]:
        """MAP, mean-field inference with the chosen eta, and with eta = 1 if that was in the grid and not chosen."""
        best = self.chosen[network]
        found = [_row(network, "MAP", None, self._of(network, None))]
        found.append(_row(network, "MeanField, chosen", best, self._of(network, best)))
        if best != 1.0 and 1.0 in self.settings.etas:
            found.append(_row(network, "MeanField", 1.0, self._of(network, 1.0)))
        return found

    def _of(self, network: str, eta: float | None) -> list[Result[Cell]]:
        return [one for one in self.results if (one.cell.network, one.cell.eta) == (network, eta)]

    def notes(self) -> list[str]:
        """For each network, how mean-field inference with the chosen eta compares with MAP on the test images."""
        found = []
        for network in self.chosen:
            point, chosen = self.rows(network)[:2]
            difference = {key: chosen.scores[f"test_{key}"][0] - point.scores[f"test_{key}"][0] for key in METRICS}
            words = [
                f"error {abs(difference['error']):.2f} points {'above' if difference['error'] > 0 else 'below'} MAP's "
                f"({'' if difference['error'] <= WITHIN else 'not '}within {WITHIN} points)",
                *(f"{METRICS[key]} {'worse' if difference[key] > 0 else 'no worse'}" for key in ("nll", "ece")),
            ]
            found.append(f"{NETWORKS[network].label}, eta {chosen.eta:g}: {', '.join(words)}")
        return found

    def document(self) -> dict[str, Any]:
        """Every number of the study, ready for JSON."""
        return {
            "settings": self.settings.config(),
            **processor(self.settings.device),
            "eta_is_chosen_by": f"NLL of the first seed on {self.settings.held_out} held-out training images",
            "chosen": self.chosen,
            "methods": [_as_json(row) for network in self.chosen for row in self.rows(network)],
            "fits": [{**asdict(one.cell), **one.scores, "seconds": one.seconds} for one in self.results],
            "notes": self.notes(),
        }


def run(settings: Settings, folder: Path, report: Report = silent) -> Study:
    """Run the study, or the part of it that `folder` does not hold yet; `report` is told a line about each fit.

    The first seed is fitted with every eta of the grid; the others by MAP, with the eta that was chosen, and eta = 1.
    """
    whole = read_images(settings)
    results: list[Result[Cell]] = []
    chosen: dict[str, float] = {}
    for network in dict.fromkeys(settings.networks):
        data = whole.flat() if NETWORKS[network].flat else whole
        first = [Cell(network, eta, 0) for eta in (None, *dict.fromkeys(settings.etas))]
        grid = list(_results(first, data, folder, settings, report))
        best = min(grid[1:], key=lambda result: result.scores["held_out_nll"]).cell.eta
        assert best is not None
        chosen[network] = best
        report(f"{NETWORKS[network].label}: eta {best:g} has the least NLL on held-out images")
        again = (None, *dict.fromkeys((best, *(eta for eta in settings.etas if eta == 1.0))))
        others = [Cell(network, eta, seed) for seed in range(1, settings.seeds) for eta in again]
        results += [*grid, *_results(others, data, folder, settings, report)]
    return Study(settings, tuple(results), chosen)


def _results(
    cells: Sequence[Cell], data: Images, folder: Path, settings: Settings, report: Report
) -> Iterator[Result[Cell]]:
    starts: dict[int, Posterior] = {}  # of one seed at a time
    for cell in cells:
        found = stored(cell, data, folder, settings)
        there = found is not None
        if found is None:
            if cell.eta is not None and cell.seed not in starts:
                starts = {cell.seed: start(cell.network, cell.seed, data, settings)}
            found = fit(cell, None if cell.eta is None else starts[cell.seed], data, folder, settings)
        shown = ", ".join(f"{label} {found.scores[f'held_out_{key}']:.4g}" for key, label in METRICS.items())
        report(f"{cell}: held out {shown}, {'there already' if there else f'{found.seconds:.0f} s'}")
        yield found


def _row(network: str, method: str, eta: float | None, results: Sequence[Result[Cell]]) -> Row:
    scores = {key: mean_and_spread([one.scores[key] for one in results]) for key in results[0].scores}
    return Row(network, method, eta, len(results), scores)


def _as_json(row: Row) -> dict[str, Any]:
    scores = {key: {"mean": mean, "standard_deviation": spread} for key, (mean, spread) in row.scores.items()}
    return {**asdict(row), "scores": scores}


def show(out: Any, study: Study) -> None:
    """Print the tables."""
    settings = study.settings
    for network in study.chosen:
        title(out, f"{settings.data_set}, {NETWORKS[network].label}, test images")
        rows = table("", "eta", *METRICS.values(), "mean sigma")
        for row in study.rows(network):
            numbers = [with_error(*row.scores[f"test_{key}"]) for key in METRICS]
            sigma = "" if row.eta is None else f"{row.scores['mean_scale'][0]:.3g}"
            rows.add_row(row.method, "" if row.eta is None else f"{row.eta:g}", *numbers, sigma)
        out.print(rows)
    choice = f"eta chosen by the NLL of the first seed on {settings.held_out} held-out training images."
    remark(out, f"Mean ± standard deviation over {settings.seeds} seeds; {choice}")
    notes(out, study.notes())
