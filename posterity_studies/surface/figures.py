"""The figures of the study."""

import math
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from posterity.report.canvas import BLACK, BLUE, GREEN, GREY, RED, array, gentle, panels, plain, save
from posterity_studies.frame import draw_all
from posterity_studies.surface.fits import CHAINS
from posterity_studies.surface.problem import REACH, Surface, axis
from posterity_studies.surface.study import Study

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LEVELS = (0.5, 2.0, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0, 1280.0)  # nats above the minimum
SHARES = (0.9, 0.5)  # shares of the mass inside the level lines of a density


def draw(study: Study, folder: Path) -> list[str]:
    """Draw the figures of the study into the folder; return the names of the files."""
    return draw_all({"surface.png": _surface, "two_modes.png": _two_modes}, study, folder)


def _surface(study: Study, path: Path) -> None:
    """Draw both potentials with gradient descents, and the functions of the two modes."""
    figure, (line, network, functions) = panels(1, 3, size=(4.3, 4.0))
    _descents(line, study.surfaces["line"])
    line.set_title("f(x) = a + b x: V is convex", fontsize=11)
    _descents(network, study.surfaces["network"])
    network.set_title("f(x) = a tanh(b x): two modes, a saddle", fontsize=11)
    x, mean, scale = array(study.x), array(study.mean), array(study.scale)
    functions.fill_between(
        x, mean - 2 * scale, mean + 2 * scale, color=BLUE, alpha=0.2, linewidth=0, label="exact, ± 2 deviations of f"
    )
    functions.plot(x, mean, color=BLUE, linewidth=1.6, label="exact posterior mean")
    for values, colour, style, name in zip(
        study.functions, (GREEN, RED), ("solid", "dashed"), ("one mode", "the other mode"), strict=True
    ):
        functions.plot(x, array(values), color=colour, linestyle=style, linewidth=2.0, label=name)
    rows = study.surfaces["network"]
    functions.plot(array(rows.inputs[:, 0]), array(rows.targets[:, 0]), "o", color=BLACK, markersize=4, label="rows")
    functions.set(xlabel="x", ylabel="f(x)")
    functions.set_title("Both modes are one function", fontsize=11)
    functions.legend(frameon=False, fontsize=9, loc="upper left")
    plain(functions)
    save(figure, path, legend_of=network, ncols=3)


def _descents(panel: "Axes", surface: Surface) -> None:
    """Draw level lines of V, its convex region, and descents from all starts."""
    at, values = array(axis()), array(surface.potential.log1p().T)  # rows are the second weight
    levels = [math.log1p(level) for level in LEVELS]
    panel.contourf(at, at, values, levels=[0.0, *levels], cmap=gentle("Blues_r", 0.2, 1.0), extend="max")
    panel.contour(at, at, values, levels=levels, colors=GREY, linewidths=0.6)
    if surface.convex_share < 1.0:
        panel.contour(
            at, at, array(surface.curvature.T), levels=[0.0], colors=BLACK, linewidths=1.2, linestyles="dotted"
        )
        panel.plot([], [], color=BLACK, linewidth=1.2, linestyle="dotted", label="edge of where V is convex")
    panel.plot(array(surface.paths[..., 0]), array(surface.paths[..., 1]), color=RED, linewidth=1.2)
    panel.plot(*array(surface.paths[0].T), ".", color=RED, markersize=6, label="start of a descent")
    panel.plot(*array(surface.modes.T), "*", color=BLACK, markersize=13, linestyle="none", label="mode")
    panel.set(xlabel="b", ylabel="a", xlim=(-REACH, REACH), ylim=(-REACH, REACH))
    panel.set_aspect("equal")


def _two_modes(study: Study, path: Path) -> None:
    """Draw the exact density, and each method over its level lines."""
    figure, axes = panels(2, 3, size=(3.6, 3.45), sharex=True, sharey=True)
    exact = study.surfaces["network"].masses
    at = array(axis())
    for panel, (name, own) in zip(axes, study.methods.items(), strict=True):
        panel.contourf(at, at, array(exact.T), levels=12, cmap=gentle("Greys", 0.0, 0.9))
        if own.masses is not None and name != "exact":
            panel.contour(at, at, array(own.masses.T), levels=_levels(own.masses), colors=BLUE, linewidths=1.4)
        if own.draws is not None:
            panel.plot(*array(own.draws.T), ".", color=BLUE, markersize=2.5, alpha=0.6)
        title = f"{name[0].upper()}{name[1:]}: p(b > 0) = {own.positive:.2f}"
        if own.divergence is not None and name != "exact":
            title += f"\nKL(q ‖ p) = {own.divergence:.2f} nats"
        if own.crossed is not None:
            title += f"\n{own.crossed} of {CHAINS} chains cross"
        panel.set_title(title, fontsize=10)
        panel.set_aspect("equal")
        panel.set(xlim=(-REACH, REACH), ylim=(-0.8 * REACH, 0.8 * REACH))
    for panel in axes[3:]:
        panel.set_xlabel("b")
    for panel in axes[::3]:
        panel.set_ylabel("a")
    figure.suptitle("Grey: exact posterior density. Blue: lines around 50 % and 90 % of q, or draws", fontsize=11)
    save(figure, path)


def _levels(masses: Tensor) -> list[float]:
    """Return the densities whose level lines enclose the shares, ascending."""
    ordered = masses.flatten().sort(descending=True).values
    total = ordered.cumsum(0)
    return [float(ordered[int((total < share).sum())]) for share in SHARES]
