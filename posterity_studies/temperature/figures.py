"""The figures of the study: every score against eta, against tau, and against the T of cold posteriors."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from posterity.report.canvas import BLUE, GREEN, GREY, ORANGE, RED, panels, plain, save
from posterity_studies.frame import mean_curve, shades
from posterity_studies.temperature.cold import KINDS, OFF, ColdRow, ColdStudy
from posterity_studies.temperature.settings import Settings
from posterity_studies.temperature.study import Row, Study, Width

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D

PANELS = {
    "accuracy": "accuracy",
    "nll": "NLL, nats",
    "ece": "ECE",
    "confidence": "confidence",
    "ood_auroc": "OOD AUROC",
    "kl_per_unit": "",
    "mean_sigma": r"mean $\sigma$ of a weight",
}
LOGARITHMIC = ("kl_per_unit", "mean_sigma")
Place = Callable[[Row], float]


def draw(study: Study | ColdStudy, folder: Path) -> list[str]:
    """Draw the figures into the folder, and give the names of the files."""
    if isinstance(study, ColdStudy):
        against_cold(study, folder / "cold.png")
        return ["cold.png"]
    against_eta(study, folder / "eta.png")
    against_tau(study, folder / "tau.png")
    return ["eta.png", "tau.png"]


def against_eta(study: Study, path: Path) -> None:
    """Draw scores against eta, with eta = 1 in red."""
    _figure(study, path, lambda row: row.eta, r"$\eta$, the weight of the KL", bayes_line=True)


def against_tau(study: Study, path: Path) -> None:
    """Draw scores against tau = eta N/p, with eta = 1 of each width in red."""
    units = study.settings.architecture.units
    _figure(study, path, lambda row: row.tau, rf"$\tau = \eta N/p$, with $N$ {units}", bayes_line=False)


def _figure(study: Study, path: Path, place: Place, label: str, *, bayes_line: bool) -> None:
    known = {key for width in study.widths for row in study.rows(width) for key in row.scores}
    shown = [key for key in PANELS if key in known]
    figure, axes = panels(2, 4, size=(3.5, 2.9))
    colours = shades(len(study.widths))
    unit = study.settings.architecture.units.removesuffix("s")
    for axis, key in zip(axes, shown, strict=False):
        for number, (width, colour) in enumerate(zip(study.widths, colours, strict=True)):
            thick = 1.2 + 0.6 * (len(study.widths) - 1 - number)  # curves that coincide are all seen
            rows = study.rows(width)
            _curve(axis, [place(row) for row in rows], rows, key, colour, thick)
            if key == "nll":
                _curve(axis, [place(row) for row in rows], rows, "gibbs_nll", colour, thick, "dashed")
            if key == "mean_sigma" and width.start_sigma is not None:
                axis.axhline(width.start_sigma, color=colour, linestyle="dashdot", linewidth=1.2)
            _marks(axis, study, width, key, place, marks=not bayes_line)
        if key in LOGARITHMIC:
            axis.set_yscale("log")
        _levels(axis, key, study.classes)
        if bayes_line:
            axis.axvline(1.0, color=RED, linewidth=1.3, zorder=0)
        _finish(axis, PANELS[key] or rf"KL$(q \Vert P_0)$ / {unit}, nats", label)
    for axis in axes[len(shown) :]:
        axis.set_axis_off()
    _legend(study, axes[-1], colours, bayes_line=bayes_line)
    figure.suptitle(_title(study.settings, study.num_data), fontsize=11)
    save(figure, path)


def _curve(
    axis: "Axes",
    where: Sequence[float],
    rows: Sequence[Row] | Sequence[ColdRow],
    key: str,
    colour: str,
    thick: float,
    linestyle: str = "solid",
) -> None:
    scores = [row.scores[key] for row in rows]
    mean_curve(axis, where, scores, 0.18, color=colour, linestyle=linestyle, linewidth=thick, markersize=2.5)


def _marks(axis: "Axes", study: Study, width: Width, key: str, place: Place, *, marks: bool) -> None:
    """Mark eta = 1 by a diamond, and for a single width the best temperature by a line."""
    bayes, best = study.row(width, 1.0), study.best(width)
    if marks and bayes is not None:
        axis.plot([place(bayes)], [bayes.scores[key][0]], "D", color=RED, markersize=5, zorder=4)
    if best is not None and len(study.widths) == 1:
        axis.axvline(place(best), color=GREEN, linewidth=1.3, linestyle="dashed", zorder=0)


def _levels(axis: "Axes", key: str, classes: int) -> None:
    """Draw the score of a uniform guess as a dotted line, and set limits that all figures share."""
    chance = {"accuracy": 1 / classes, "confidence": 1 / classes, "nll": math.log(classes), "ood_auroc": 0.5}
    if key in chance:
        axis.axhline(chance[key], color=GREY, linestyle="dotted", linewidth=1.2)
    if key in ("accuracy", "confidence"):
        axis.set_ylim(0.0, 1.02)
    elif key == "nll":
        axis.set_ylim(0.0, 1.6 * math.log(classes))


def _finish(axis: "Axes", name: str, label: str) -> None:
    axis.set_xscale("log")
    axis.set_xlabel(label, fontsize=10)
    axis.set_ylabel(name, fontsize=10)
    plain(axis)


def _line(label: str, **look: object) -> "Line2D":
    """Return an entry of a legend."""
    from matplotlib.lines import Line2D

    return Line2D([], [], label=label, **{"linewidth": 1.4, **look})  # type: ignore[arg-type]


def _legend(study: Study, axis: "Axes", colours: Sequence[str], *, bayes_line: bool) -> None:
    """Draw the legend of widths, lines and marks in the last panel."""
    names = [
        study.settings.architecture.label if width.width is None else f"width {width.width}, $N$ = {width.units:,}"
        for width in study.widths
    ]
    entries = [_line(name, color=colour) for colour, name in zip(colours, names, strict=True)]
    look = {} if bayes_line else {"marker": "D", "markersize": 5, "linestyle": "none"}
    entries.append(_line(r"$\eta = 1$", color=RED, **look))
    best = study.best(study.widths[0]) if len(study.widths) == 1 else None
    if best is not None:
        text = rf"best: $\eta$ = {best.eta:.2g}, $\tau$ = {best.tau:.2g}"
        entries.append(_line(text, color=GREEN, linestyle="dashed"))
    entries.append(_line("chance", color=GREY, linestyle="dotted"))
    entries.append(_line("Gibbs NLL", color=GREY, linestyle="dashed"))
    if any(width.start_sigma is not None for width in study.widths):
        entries.append(_line(r"$\sigma$ before the first step", color=GREY, linestyle="dashdot"))
    axis.legend(handles=entries, frameon=False, fontsize=9, loc="center")


def against_cold(study: ColdStudy, path: Path) -> None:
    """Draw accuracy, NLL, calibration and sampler temperatures against T; crosses mark wrong temperatures."""
    rows = study.rows()
    where = [row.temperature for row in rows]
    figure, axes = panels(2, 2, size=(4.2, 3.0))
    for axis, key in zip(axes, ("accuracy", "nll", "ece"), strict=False):
        _curve(axis, where, rows, key, BLUE, 1.6)
        if key == "nll":
            _curve(axis, where, rows, "gibbs_nll", BLUE, 1.2, "dashed")
        _crosses(axis, rows, key)
        axis.axvline(1.0, color=RED, linewidth=1.3, zorder=0)
        _finish(axis, PANELS[key], "$T$")
    last = axes[-1]
    last.axhspan(1.0 - OFF, 1.0 + OFF, color=GREEN, alpha=0.15, linewidth=0)
    for kind, colour in zip(KINDS, (BLUE, ORANGE), strict=True):
        _curve(last, where, rows, kind, colour, 1.6)
        _crosses(last, [row for row in rows if kind in row.off], kind)
    last.axvline(1.0, color=RED, linewidth=1.3, zorder=0)
    _finish(last, "temperature of the sampler / $T$", "$T$")
    entries = [
        _line("kinetic", color=BLUE),
        _line("configurational", color=ORANGE),
        _line("$T = 1$", color=RED),
        _line("Gibbs NLL", color=BLUE, linestyle="dashed"),
        _line(f"off by more than {100 * OFF:.0f} %", color=RED, marker="x", linestyle="none", markersize=7),
    ]
    figure.legend(handles=entries, frameon=False, fontsize=9, loc="outside lower center", ncols=3)
    figure.suptitle(_title(study.settings, study.num_data), fontsize=11)
    save(figure, path)


def _crosses(axis: "Axes", rows: Sequence[ColdRow], key: str) -> None:
    """Cross out points that were not sampled at their temperature."""
    off = [row for row in rows if row.off]
    axis.plot(
        [row.temperature for row in off], [row.scores[key][0] for row in off], "x", color=RED, markersize=8, zorder=5
    )


def _title(settings: Settings, num_data: int) -> str:
    count = settings.all_seeds
    seeds = f"mean and standard deviation over {count} seeds" if count > 1 else "one seed"
    name = settings.method_name.upper() if settings.cold else settings.method_name
    return f"{settings.data}, {settings.architecture.label}, {name}, $p$ = {num_data:,}: test rows, {seeds}"
