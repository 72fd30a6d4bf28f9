"""The figures of the study: distance to the truth against time, for the small problems and for CIFAR-10."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from posterity.inference.sweep import Result
from posterity.report.canvas import BLACK, BLUE, GREEN, GREY, ORANGE, PINK, RED, panels, plain, save
from posterity_studies.fidelity.image_recipes import ROWS
from posterity_studies.fidelity.images import Images, equilibrium, label
from posterity_studies.fidelity.problems import PROBLEMS
from posterity_studies.fidelity.small import Cell
from posterity_studies.fidelity.study import NEAR, SHARE, Compared, Study

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FAMILIES = {
    "points": ("o", GREY),
    "Laplace": ("s", ORANGE),
    "variational": ("^", BLUE),
    "SWAG": ("D", PINK),
    "samplers": ("v", GREEN),
}
"""Marker and colour of each kind of method."""
GOALS = {"agreement": 0.91, "total_variation": 0.125}
"""What the best row on CIFAR-10 should reach."""
COLUMNS = 3
SHORTEST = 0.02  # seconds of a fit, for the axis


def draw(study: Study, folder: Path) -> list[str]:
    """Draw the figures into the folder, and give the names of the files."""
    names = []
    if study.compared:
        _small(study.compared, folder / "distances.png")
        names.append("distances.png")
    if study.images is not None and study.images.results:
        _images(study.images, folder / "cifar-10.png")
        names.append("cifar-10.png")
    return names


def _small(problems: Sequence[Compared], path: Path) -> None:
    """A panel for each problem: total variation against seconds, and where the goal lies."""
    columns = min(COLUMNS, len(problems))
    rows = -(-len(problems) // columns)
    figure, axes = panels(rows, columns, size=(4.6, 3.7), beside=(0.0, 0.6))
    for panel, part in zip(axes, problems, strict=False):
        _problem(panel, part)
    for panel in axes[len(problems) :]:
        panel.set_axis_off()
    for panel in axes[::columns]:
        panel.set_ylabel("total variation to the truth", fontsize=10)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    save(figure, path)


def _problem(panel: "Axes", part: Compared) -> None:
    floor = part.truth.floor["total_variation"]
    times = [max(SHORTEST, result.seconds) for result in part.nuts]
    panel.plot(
        times,
        [result.scores["total_variation"] for result in part.nuts],
        "x-",
        color=BLACK,
        label="NUTS, rising length",
    )
    for family, (marker, colour) in FAMILIES.items():
        chosen = [result for result in part.methods if result.cell.recipe.family == family]
        panel.plot(
            [max(SHORTEST, result.seconds) for result in chosen],
            [_variation(result) for result in chosen],
            marker,
            color=colour,
            markersize=6,
            label=family,
        )
    nearest = min(part.methods, key=_variation)
    marked = [(nearest, -15), *((result, 9) for result in part.quick[:1] if result.cell != nearest.cell)]
    for result, offset in marked:
        panel.annotate(
            result.cell.recipe.label,
            (max(SHORTEST, result.seconds), _variation(result)),
            xytext=(0, offset),
            textcoords="offset points",
            fontsize=8,
            ha="center",
        )
    panel.set(xscale="log", yscale="log", xlabel="seconds")
    low, high = panel.get_xlim()
    bottom, _ = panel.get_ylim()
    panel.fill_between(
        [low, SHARE * part.seconds],
        0.7 * bottom,
        NEAR,
        color=GREEN,
        alpha=0.12,
        linewidth=0,
        label=f"within {NEAR:g} in a tenth of NUTS's time",
    )
    panel.axhline(floor, color=RED, linestyle="dotted", linewidth=1.2, label="one run of the truth to the others")
    panel.set_xlim(low, high)
    panel.set_ylim(bottom=0.7 * bottom)
    panel.set_title(PROBLEMS[part.name].label, fontsize=11)
    plain(panel)


def _variation(result: Result[Cell]) -> float:
    return result.scores["total_variation"]


def _images(images: Images, path: Path) -> None:
    """Agreement and total variation against minutes, rows by number; hollow: chains that are not in equilibrium."""
    figure, axes = panels(1, 3, size=(4.6, 4.4), beside=(0.0, 0.6))
    names = {"agreement": "agreement with HMC", "total_variation": "total variation to HMC"}
    for panel, (name, words) in zip(axes, names.items(), strict=False):
        shown: set[str] = set()
        for number, result in enumerate(images.ordered, start=1):
            family = ROWS[result.cell.method].family
            marker, colour = FAMILIES[family]
            point = result.seconds / 60.0, result.scores[name]
            panel.plot(
                *point,
                marker,
                color=colour,
                markerfacecolor="white" if equilibrium(result) is False else colour,
                markersize=7,
                label="" if family in shown else family,
            )
            shown.add(family)
            side = 6 if number % 2 else -6
            panel.annotate(
                str(number),
                point,
                xytext=(side, 4),
                textcoords="offset points",
                fontsize=8,
                ha="left" if side > 0 else "right",
            )
        panel.axhline(GOALS[name], color=RED, linestyle="dotted", linewidth=1.2, label="goal")
        panel.set(xlabel="minutes", xscale="log")
        panel.set_ylabel(words, fontsize=10)
        panel.margins(x=0.15)
        plain(panel)
    axes[2].set_axis_off()
    lines = [
        f"{number}  {label(result.cell)}{' (not in equilibrium)' if equilibrium(result) is False else ''}"
        for number, result in enumerate(images.ordered, start=1)
    ]
    axes[2].text(0.0, 1.0, "\n".join(lines), va="top", fontsize=9, linespacing=1.6, transform=axes[2].transAxes)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=6, frameon=False, fontsize=9)
    save(figure, path)
