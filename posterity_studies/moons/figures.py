"""The figures of the study: maps of p(y = 1 | x) and of its entropy, and the scores with their intervals."""

import math
from pathlib import Path
from typing import TYPE_CHECKING

from posterity.report.canvas import BLACK, BLUE, array, gentle, panels, plain, save
from posterity_studies.frame import draw_all
from posterity_studies.moons.fits import axes as grid_axes
from posterity_studies.moons.study import METRICS, Study

if TYPE_CHECKING:
    from matplotlib.colors import Colormap

TWO = (("upper", "#0072b2", "o"), ("lower", "#d55e00", "^"))
DARK = (("upper", "#053061", "o"), ("lower", "#67001f", "^"))  # the dark ends of the map of p
SHOWN = ("test_nll", "calibration_error", "entropy_on_the_data", "entropy_on_the_ring")


def draw(study: Study, folder: Path) -> list[str]:
    """Draw the figures of the study into the folder; return the names of the files."""
    return draw_all({"entropy.png": _entropy, "probability.png": _probability, "scores.png": _scores}, study, folder)


def _entropy(study: Study, path: Path) -> None:
    _maps(study, path, "map_entropy", gentle("Greys", 0.0, 0.75), math.log(2), "entropy of the label, nats")


def _probability(study: Study, path: Path) -> None:
    _maps(study, path, "map_probability", gentle("RdBu_r", 0.15, 0.85), 1.0, "p(lower | x), line at 0.5")


def _maps(study: Study, path: Path, kind: str, colours: "Colormap", highest: float, label: str) -> None:
    """Draw a map of every method on one colour scale from 0 to `highest`; maps of p have the line p = 0.5."""
    seed = study.found[0]
    first, second = grid_axes()
    extent = (float(first[0]), float(first[-1]), float(second[0]), float(second[-1]))
    figure, axes = panels(2, 4, size=(3.1, 3.2), sharex=True, sharey=True)
    for panel, (name, fit) in zip(axes, seed.fits.items(), strict=False):
        shown = array(getattr(fit, kind).reshape(len(first), len(second)).T)  # rows are the second input
        panel.imshow(shown, origin="lower", extent=extent, cmap=colours, vmin=0, vmax=highest, interpolation="bilinear")
        if kind == "map_probability" and shown.min() < 0.5 < shown.max():
            panel.contour(array(first), array(second), shown, [0.5], colors=BLACK, linewidths=1.2)
        for index, (title, colour, marker) in enumerate(DARK if kind == "map_probability" else TWO):
            rows = seed.data.train.inputs[seed.data.train.targets == index]
            panel.scatter(
                array(rows[:, 0]), array(rows[:, 1]), s=7, color=colour, marker=marker, linewidths=0, label=title
            )
        panel.set_title(f"{name}: test NLL {fit.test_nll:.3f}", fontsize=10)
        panel.set_aspect("equal")
    for panel in axes[len(seed.fits) :]:
        panel.set_axis_off()
    for panel in axes[3:7]:
        panel.set_xlabel("$x_1$")
        panel.tick_params(labelbottom=True)
    for panel in axes[::4]:
        panel.set_ylabel("$x_2$")
    handles, names = axes[0].get_legend_handles_labels()
    axes[-1].legend(handles, names, loc="upper left", frameon=False, fontsize=10, title="training rows")
    bar = figure.colorbar(axes[0].images[0], ax=axes, shrink=0.7, pad=0.02)
    bar.set_label(label, fontsize=10)
    save(figure, path)


def _scores(study: Study, path: Path) -> None:
    result = study.intervals()
    figure, axes = panels(1, len(SHOWN), size=(3.1, 2.9), sharey=True)
    for panel, metric in zip(axes, SHOWN, strict=True):
        for line, metrics in enumerate(result.values()):
            interval = metrics[metric]
            panel.plot(interval.values, [line] * len(interval.values), ".", color=BLUE, alpha=0.35, markersize=5)
            panel.errorbar(
                interval.mean, line, xerr=interval.half, fmt="o", color=BLUE, markersize=5, capsize=3, linewidth=1.4
            )
        panel.axvline(result["MAP"][metric].mean, color=BLACK, linewidth=0.7, linestyle="dotted", zorder=0)
        panel.set_yticks(range(len(result)), list(result))
        panel.set_title(METRICS[metric], fontsize=10)
        panel.locator_params(axis="x", nbins=5)
        plain(panel)
    axes[0].set_ylim(len(result) - 0.5, -0.5)
    figure.suptitle(
        f"Two moons, {len(study.seeds)} seeds (dots): mean and 95 % interval by Student's t. Dotted: MAP", fontsize=10
    )
    save(figure, path)
