"""The figures of the study: scores by method, and scores against the strength of each change."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from posterity.report.canvas import BLACK, BLUE, GREEN, GREY, ORANGE, PINK, RED, SKY, panels, plain, save
from posterity_studies.shift.changes import CHANGES
from posterity_studies.shift.recipes import RECIPES, ROWS
from posterity_studies.shift.study import CURVES, FOREIGN, Study, short

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LINES = {
    "map": (BLACK, "solid", "o"),
    "ensemble": (BLUE, "solid", "s"),
    "dropout": (GREY, "solid", "v"),
    "mean-field": (ORANGE, "solid", "^"),
    "natural-gradient": (RED, "solid", "^"),
    "laplace": (GREEN, "dashed", "o"),
    "laplace-ensemble": (GREEN, "solid", "s"),
    "swag": (PINK, "dashed", "D"),
    "multi-swag": (SKY, "solid", "D"),
}
"""Colour, line and marker of each method."""
COLUMNS = 6  # of the legend
SCORES = {"error": "error, %", "nll": "NLL", "ece": "ECE", "brier": "Brier score"}


def draw(study: Study, folder: Path) -> list[str]:
    """Draw two figures for each network into the folder, and give the names of the files."""
    names = []
    for network in study.networks:
        names += [f"{network}.png", f"{network}-shift.png"]
        _table(study, network, folder / names[-2])
        _curves(study, network, folder / names[-1])
    return names


def _table(study: Study, network: str, path: Path) -> None:
    """A panel for each score, a line for each method: as predicted and, hollow, with a fitted temperature."""
    results = study.rows(network)
    scores = {**SCORES, **{f"auroc_{name}": f"AUROC, {short(name)}" for name in FOREIGN[study.settings.data]}}
    figure, axes = panels(1, len(scores), size=(2.1, 0.9 + 0.26 * len(results)), sharey=True)
    for panel, (score, label) in zip(axes, scores.items(), strict=True):
        for line, result in enumerate(results):
            colour, _, marker = LINES[result.cell.method]
            numbers = result.scores
            value = 100.0 * (1.0 - numbers["accuracy"]) if score == "error" else numbers[score]
            panel.plot(value, line, marker, color=colour, markersize=6)
            if f"calibrated_{score}" in numbers:
                panel.plot(numbers[f"calibrated_{score}"], line, marker, color=colour, markersize=6, fillstyle="none")
        panel.set_xlabel(label, fontsize=10)
        panel.margins(x=0.15)
        panel.locator_params(axis="x", nbins=3)
        plain(panel)
    axes[0].set_yticks(range(len(results)), [ROWS[result.cell.method].label for result in results])
    axes[0].set_ylim(len(results) - 0.5, -0.5)
    figure.suptitle(f"{_about(study, network)}. Hollow: with a temperature fitted to held-out images", fontsize=10)
    save(figure, path)


def _curves(study: Study, network: str, path: Path) -> None:
    """A column for each change and a row for each score, against the strength of the change."""
    results = study.rows(network)
    figure, axes = panels(len(CURVES), len(CHANGES), size=(2.8, 2.0), beside=(0.0, 0.5), sharex="col")
    for row, (score, label) in enumerate(CURVES.items()):
        for column, (name, change) in enumerate(CHANGES.items()):
            panel = axes[row * len(CHANGES) + column]
            for result in results:
                _line(panel, result.curves[f"{name}/{score}"], result.cell.method)
            plain(panel)
            if column == 0:
                panel.set_ylabel(label, fontsize=10)
            if row == len(CURVES) - 1:
                panel.set_xlabel(change.label, fontsize=9)
    handles, labels = axes[0].get_legend_handles_labels()
    columns = min(len(results), COLUMNS)
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)
    figure.suptitle(f"{_about(study, network)}, the first {study.settings.shifted:,} changed", fontsize=10)
    save(figure, path)


def _line(panel: "Axes", curve: Sequence[Sequence[float]], method: str) -> None:
    colour, style, marker = LINES[method]
    strengths, values = zip(*curve, strict=True)
    panel.plot(
        strengths, values, color=colour, linestyle=style, marker=marker, markersize=3, linewidth=1.3,
        label=ROWS[method].label,
    )  # fmt: skip


def _about(study: Study, network: str) -> str:
    how = ", with augmentation" if study.settings.augment else ""
    return f"{study.settings.data}, {RECIPES[network].label}{how}, test images"
