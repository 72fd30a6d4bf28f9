"""The figures of the study: deviations of ranks from uniform, as curves and histograms with bands."""

import math
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from posterity.numerics.random import Key
from posterity.report.canvas import BLUE, GREEN, GREY, ORANGE, PINK, RED, SKY, array, panels, plain, save
from posterity_studies.calibration.calibrate import counts_of
from posterity_studies.calibration.study import THRESHOLD, Row, Study

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = (BLUE, ORANGE, GREEN, PINK, SKY)
LEVEL = 0.99  # of the bands
SIMULATIONS = 1000
WIDEST = 5  # panels beside each other


def draw(study: Study, folder: Path) -> list[str]:
    """Draw the figures of the study into the folder; return the names of the files."""
    head = study.rows[0].found
    widest = band_width(head.replicates, head.draws)
    share = f"{LEVEL:.0%}".replace("%", " %")
    _grid(
        study,
        folder / "ecdf.png",
        lambda panel, row: _curves(panel, row, widest),
        f"Ranks of true values among {head.draws} draws, {head.replicates:,} replicates: empirical distribution "
        f"function minus the uniform one, a curve for each test quantity. Grey: where {share} of "
        "calibrated curves stay.",
        ("rank / draws", "difference"),
    )
    _grid(
        study,
        folder / "histograms.png",
        _bars,
        f"Histogram of the ranks of the test quantity with the smallest p, {head.replicates:,} replicates. "
        f"Grey: where {share} of calibrated bars end.",
        ("rank / draws", "replicates"),
    )
    return ["ecdf.png", "histograms.png"]


def band_width(replicates: int, draws: int) -> float:
    """Return the half width, in standard errors, of a band that contains `LEVEL` of all EDFs of uniform ranks.

    By simulation, as Säilynoja, Bürkner and Vehtari (2022) do.
    """
    ranks = torch.randint(draws + 1, (SIMULATIONS, replicates), generator=Key(0).generator("cpu"), device="cpu")
    away = torch.stack([_away(counts_of(rank, draws, draws + 1)) for rank in ranks])  # (simulations, draws)
    return float((away / _errors(replicates, draws)).abs().amax(1).quantile(LEVEL))


def _away(counts: Tensor) -> Tensor:
    """Return the empirical minus the uniform distribution function after each rank but the last, (draws,)."""
    total = counts.double().cumsum(0)
    return (total / total[-1] - torch.arange(1, len(counts) + 1, device="cpu") / len(counts))[:-1]


def _errors(replicates: int, draws: int) -> Tensor:
    share = torch.arange(1, draws + 1, dtype=torch.float64, device="cpu") / (draws + 1)
    return (share * (1.0 - share) / replicates).sqrt()


def _grid(
    study: Study, path: Path, draw_panel: Callable[["Axes", Row], None], title: str, labels: tuple[str, str]
) -> None:
    """Return a grid of panels, with a column for each method and a row for each model."""
    models, methods = ([*dict.fromkeys(getattr(row, name) for row in study.rows)] for name in ("model", "method"))
    lines = 1 if len(methods) <= WIDEST else 2
    columns = math.ceil(len(methods) / lines)
    figure, axes = panels(lines * len(models), columns, size=(3.0, 2.2), sharex=True)
    for panel in axes:
        panel.set_axis_off()
    for row in study.rows:
        index = methods.index(row.method)
        line = models.index(row.model) * lines + index // columns
        panel = axes[line * columns + index % columns]
        panel.set_axis_on()
        draw_panel(panel, row)
        p = row.found.smallest
        shown = f"p = {p:.2g}" if p >= 1e-10 else "p < 1e-10"
        panel.set_title(f"{row.model}, {row.method}: {shown}", fontsize=9, color="black" if row.passes else RED)
        panel.tick_params(labelsize=8, labelbottom=True)
        if index % columns == 0:
            panel.set_ylabel(labels[1], fontsize=9)
        if panel.get_legend_handles_labels()[0] and (index % columns == columns - 1 or row.method == methods[-1]):
            panel.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.05))
        if line == lines * len(models) - 1 or index + columns >= len(methods):
            panel.set_xlabel(labels[0], fontsize=9)
        plain(panel)
    if not all(row.passes for row in study.rows):
        title += f" Red: p below {THRESHOLD:g}."
    title_lines = math.ceil(len(title) / (34 * columns))  # of about the same length
    figure.suptitle("\n".join(textwrap.wrap(title, math.ceil(len(title) / title_lines) + 8)), fontsize=10)
    save(figure, path)


def _curves(panel: "Axes", row: Row, widest: float) -> None:
    result = row.found
    at = array(torch.arange(1, result.draws + 1, device="cpu") / (result.draws + 1))
    band = array(widest * _errors(result.replicates, result.draws))
    panel.fill_between(at, -band, band, color=GREY, alpha=0.25, linewidth=0)
    panel.axhline(0.0, color=GREY, linewidth=0.6)
    others = [name for name in result.ranks if name not in ("log likelihood", "log prior")]
    reach = float(band.max())
    for name, ranks in result.ranks.items():
        curve = _away(counts_of(ranks, result.draws, result.draws + 1))
        reach = max(reach, float(curve.abs().max()))
        colour = COLOURS[others.index(name) % len(COLOURS)] if name in others else "black"
        dotted = "dotted" if name == "log prior" else "solid"
        panel.plot(at, array(curve), label=name, color=colour, linewidth=1.1, linestyle=dotted)
    panel.set_ylim(-1.1 * reach, 1.1 * reach)
    panel.set_xlim(0.0, 1.0)


def _bars(panel: "Axes", row: Row) -> None:
    result = row.found
    counts = result.counts[row.worst]
    bins, expected = result.bins, result.replicates / result.bins
    at = array((torch.arange(bins, device="cpu") + 0.5) / bins)
    error = math.sqrt(expected * (1.0 - 1.0 / bins))
    quantile = math.sqrt(2.0) * float(torch.special.erfinv(torch.tensor(LEVEL, dtype=torch.float64)))
    panel.axhspan(
        max(0.0, expected - quantile * error), expected + quantile * error, color=GREY, alpha=0.25, linewidth=0
    )
    panel.axhline(expected, color=GREY, linewidth=0.8)
    panel.bar(at, array(counts), width=0.9 / bins, color=BLUE, alpha=0.85, zorder=2)
    panel.text(0.98, 0.96, row.worst, transform=panel.transAxes, ha="right", va="top", fontsize=8)
    panel.set_ylim(0.0, 1.25 * max(float(counts.max()), expected + quantile * error))
    panel.set_xlim(0.0, 1.0)
