"""The figure of the study: variances by estimator, on a logarithmic axis."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from posterity.report.canvas import BLUE, ORANGE, RED, panels, plain, save
from posterity_studies.gradients import example, network
from posterity_studies.gradients.example import ROUNDING
from posterity_studies.gradients.study import Study

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Row = example.Row | network.Row


def draw(study: Study, folder: Path) -> list[str]:
    """Draw the figures into the folder, and give the names of the files."""
    functions = list(example.FUNCTIONS)
    figure, axes = panels(1, len(functions), size=(4.6, 3.0), sharey=True)
    for panel, name in zip(axes, functions, strict=True):
        _panel(panel, [row for row in study.example if row.function == name], f"E f(w), f = {name.replace('^2', '²')}")
    q = f"q = N({example.MEAN:g}, {example.SCALE:g}²)"
    figure.suptitle(f"One weight, {q}: variance of a gradient for one pass. Crosses: exact", fontsize=11)
    save(figure, folder / "one_weight.png")
    moments = list(dict.fromkeys(row.when for row in study.network))
    figure, axes = panels(1, len(moments), size=(4.6, 3.4), sharey=True)
    for panel, when in zip(axes, moments, strict=True):
        _panel(panel, [row for row in study.network if row.when == when], f"q {when}")
    sizes = f"2-{network.HIDDEN}-2"
    figure.suptitle(f"Network {sizes}: variance of the ELBO's gradient for one pass, summed over weights", fontsize=11)
    save(figure, folder / "network.png")
    return ["one_weight.png", "network.png"]


def _panel(panel: "Axes", rows: Sequence[Row], title: str) -> None:
    for line, row in enumerate(rows):
        for shift, variance, colour, label in (
            (-0.14, row.mean, BLUE, "gradient in the mean"),
            (0.14, row.scale, ORANGE, "gradient in the scale"),
        ):
            if variance.value < ROUNDING:
                panel.text(0.01, line + shift, "0", color=colour, va="center", transform=panel.get_yaxis_transform())
                continue
            panel.errorbar(
                variance.value,
                line + shift,
                xerr=variance.error,
                fmt="o",
                markersize=5,
                capsize=2,
                color=colour,
                label=label if line == 0 else None,
            )
            if variance.exact is not None:
                panel.plot(variance.exact, line + shift, "x", color=RED, markersize=7, zorder=3)
    panel.set_xscale("log")
    panel.set_yticks(range(len(rows)), [row.estimator for row in rows])
    panel.set_ylim(len(rows) - 0.5, -0.5)
    panel.set_title(title, fontsize=11)
    panel.set_xlabel("variance", fontsize=10)
    panel.grid(axis="x", alpha=0.3)
    panel.legend(frameon=False, fontsize=8, loc="best")
    plain(panel)
