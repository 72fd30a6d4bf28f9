"""The figures of the study: every score against eta, and against tau."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from posterity.report.canvas import GREEN, GREY, RED, panels, plain, save
from posterity_studies.frame import shades
from posterity_studies.temperature.study import Row, Study, Width

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PANELS = (
    ("accuracy", "accuracy"),
    ("nll", "NLL, nats"),
    ("ece", "ECE"),
    ("confidence", "confidence"),
    ("ood_auroc", "OOD AUROC"),
)
Place = Callable[[Row], float]


def draw(study: Study, folder: Path) -> list[str]:
    """Draw both figures into the folder, and give the names of the files."""
    against_eta(study, folder / "eta.png")
    against_tau(study, folder / "tau.png")
    return ["eta.png", "tau.png"]


def against_eta(study: Study, path: Path) -> None:
    """Scores against eta; red: eta = 1."""
    _figure(study, path, lambda row: row.eta, r"$\eta$, the weight of the KL", bayes_line=True)


def against_tau(study: Study, path: Path) -> None:
    """The same against tau = eta N/p; red: where eta = 1 for each width."""
    units = study.settings.architecture.units
    _figure(study, path, lambda row: row.tau, rf"$\tau = \eta N/p$, with N {units}", bayes_line=False)


def _figure(study: Study, path: Path, panel: Place, label: str, *, bayes_line: bool) -> None:
    figure, axes = panels(2, 3, size=(3.7, 2.9))
    colours = shades(len(study.widths))
    for axis, (key, name) in zip(axes, PANELS, strict=False):
        for number, (width, colour) in enumerate(zip(study.widths, colours, strict=True)):
            thick = 1.2 + 0.6 * (len(study.widths) - 1 - number)  # curves that coincide are all seen
            _curve(axis, study.rows(width), key, panel, colour, thick)
            if key == "nll":
                _curve(axis, study.rows(width), "gibbs_nll", panel, colour, thick, "dashed")
            _marks(axis, study, width, key, panel, marks=not bayes_line)
        level = {"accuracy": 1 / study.classes, "confidence": 1 / study.classes, "nll": math.log(study.classes)}
        height = 0.5 if key == "ood_auroc" else level.get(key)
        if height is not None:
            axis.axhline(height, color=GREY, linestyle="dotted", linewidth=1.2)
        _finish(axis, name, label, bayes_line=bayes_line)
        if key in ("accuracy", "confidence"):
            axis.set_ylim(0.0, 1.02)
        elif key == "nll":
            axis.set_ylim(0.0, 1.6 * math.log(study.classes))
    last = axes[len(PANELS)]
    if any("kl_per_unit" in row.scores for width in study.widths for row in study.rows(width)):
        for width, colour in zip(study.widths, colours, strict=True):
            _curve(last, study.rows(width), "kl_per_unit", panel, colour, 1.2)
            _marks(last, study, width, "kl_per_unit", panel, marks=not bayes_line)
        last.set_yscale("log")
        unit = study.settings.architecture.units.removesuffix("s")
        _finish(last, f"KL(q ‖ prior) / {unit}, nats", label, bayes_line=bayes_line)
    else:
        last.set_axis_off()
    _legend(study, axes, colours, bayes_line=bayes_line)
    figure.suptitle(_title(study), fontsize=11)
    save(figure, path)


def _curve(
    axis: "Axes", rows: list[Row], key: str, panel: Place, colour: str, thick: float, linestyle: str = "solid"
) -> None:
    """Means with a band of a standard deviation over seeds to either side."""
    where = [panel(row) for row in rows]
    means = [row.scores[key][0] for row in rows]
    axis.plot(where, means, color=colour, linestyle=linestyle, linewidth=thick, marker="o", markersize=2.5)
    if any(row.scores[key][1] for row in rows):
        spreads = [row.scores[key][1] or 0.0 for row in rows]
        low = [mean - spread for mean, spread in zip(means, spreads, strict=True)]
        high = [mean + spread for mean, spread in zip(means, spreads, strict=True)]
        axis.fill_between(where, low, high, color=colour, alpha=0.18, linewidth=0)


def _marks(axis: "Axes", study: Study, width: Width, key: str, panel: Place, *, marks: bool) -> None:
    """A diamond where eta = 1, and for a single width a line at the best temperature."""
    bayes, best = study.row(width, 1.0), study.best(width)
    if marks and bayes is not None:
        axis.plot([panel(bayes)], [bayes.scores[key][0]], "D", color=RED, markersize=5, zorder=4)
    if best is not None and len(study.widths) == 1:
        axis.axvline(panel(best), color=GREEN, linewidth=1.3, linestyle="dashed", zorder=0)


def _finish(axis: "Axes", name: str, label: str, *, bayes_line: bool) -> None:
    if bayes_line:
        axis.axvline(1.0, color=RED, linewidth=1.3, zorder=0)
    axis.set_xscale("log")
    axis.set_xlabel(label, fontsize=10)
    axis.set_ylabel(name, fontsize=10)
    plain(axis)


def _legend(study: Study, axes: list["Axes"], colours: list[str], *, bayes_line: bool) -> None:
    """The widths in the first panel that has room for all; what lines and marks mean in the second."""
    from matplotlib.lines import Line2D

    names = [
        study.settings.architecture.label if width.width is None else f"width {width.width}" for width in study.widths
    ]
    entries = [
        Line2D([], [], color=colour, linewidth=1.6, label=name) for colour, name in zip(colours, names, strict=True)
    ]
    if bayes_line:
        entries.append(Line2D([], [], color=RED, linewidth=1.3, label=r"$\eta = 1$"))
    else:
        entries.append(Line2D([], [], color=RED, marker="D", markersize=5, linestyle="none", label=r"$\eta = 1$"))
    best = study.best(study.widths[0]) if len(study.widths) == 1 else None
    if best is not None:
        text = rf"best: $\eta$ = {best.eta:.2g}, $\tau$ = {best.tau:.2g}"
        entries.append(Line2D([], [], color=GREEN, linewidth=1.3, linestyle="dashed", label=text))
    entries.append(Line2D([], [], color=GREY, linewidth=1.2, linestyle="dotted", label="chance"))
    entries.append(Line2D([], [], color=GREY, linewidth=1.4, linestyle="dashed", label="Gibbs NLL"))
    axes[0].figure.legend(
        handles=entries, frameon=False, fontsize=9, loc="outside lower center", ncols=min(len(entries), 8)
    )


def _title(study: Study) -> str:
    settings = study.settings
    seeds = f"mean and standard deviation over {settings.seeds} seeds" if settings.seeds > 1 else "one seed"
    return (
        f"{settings.data}, {settings.architecture.label}, {settings.method}, p = {study.num_data:,}: test rows, {seeds}"
    )
