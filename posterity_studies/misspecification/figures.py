"""The figure of the study."""

from pathlib import Path

from posterity.report.canvas import BLUE, GREY, ORANGE, RED, array, panels, plain, save
from posterity_studies.misspecification.study import Study, temperatures

LEAST = 0.02  # nats: least range of a panel below and above zero
MORE = 3.0  # upper end of a panel, in units of the gain by tempering


def draw(study: Study, folder: Path) -> list[str]:
    """Draw the figure into the folder, and give the name of the file."""
    _temperatures(study, folder / "temperature.png")
    return ["temperature.png"]


def _temperatures(study: Study, path: Path) -> None:
    """NLL above that at temperature 1, by model (rows) and kind of targets (columns)."""
    figure, axes = panels(2, len(study.curves) // 2, size=(3.9, 3.0), sharex=True)
    at = array(temperatures())
    for panel, own in zip(axes, study.curves, strict=True):
        gain = 0.0
        for values, colour, style, name in (
            (own.by_eta, BLUE, "solid", r"likelihood$^{1/\eta}$ prior"),
            (own.by_temperature, ORANGE, "dashed", r"(likelihood prior)$^{1/T}$"),
        ):
            above = values - own.plain
            panel.plot(at, array(above), color=colour, linestyle=style, linewidth=1.8, label=name)
            panel.plot(own.best(values), float(above.min()), "o", color=colour, markersize=6)
            gain = max(gain, -float(above.min()))
        panel.axhline(0.0, color=GREY, linewidth=0.8)
        panel.axvline(1.0, color=RED, linewidth=1.3, zorder=0, label=r"$\eta$ = 1, T = 1")
        panel.set_xscale("log")
        panel.set_ylim(-1.3 * max(gain, LEAST), MORE * max(gain, LEAST))
        panel.set_title(f"Targets {own.targets}:\n{own.description}", fontsize=10)
        plain(panel)
    columns = len(axes) // 2
    for panel in axes[columns:]:
        panel.set_xlabel(r"$\eta$ or T")
    for panel, own in zip(axes[::columns], study.curves[::columns], strict=True):
        panel.set_ylabel(f"{own.model}:\nNLL above that at 1, nats")
    save(figure, path, legend_of=axes[0], ncols=3)
