"""The figure of the study: the test NLL over prior and noise, its best cell, and where variational EM ended."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from posterity.report.canvas import BLACK, RED, gentle, panels, save
from posterity_studies.hyperparameters.study import NOISE_SCALES, PRIOR_SCALES, SIDE, Comparison, Study

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WORST = 1.0  # nats above the best at which the colour scale ends


def draw(study: Study, folder: Path) -> list[str]:
    """Draw the heat maps into the folder, and give the names of the files."""
    comparisons = study.comparisons
    columns = len(dict.fromkeys(comparison.data_set for comparison in comparisons))
    rows = len(dict.fromkeys(comparison.method for comparison in comparisons))
    figure, axes = panels(rows, columns, size=(4.4, 4.3))
    by_panel = {(comparison.method, comparison.data_set): comparison for comparison in comparisons}
    methods, names = (list(dict.fromkeys(words)) for words in zip(*by_panel, strict=True))
    for index, panel in enumerate(axes):
        _panel(panel, by_panel[methods[index // columns], names[index % columns]])
        if index % columns == 0:
            panel.set_ylabel("prior scale")
        if index >= len(axes) - columns:
            panel.set_xlabel("noise scale (standardised target)")
    figure.suptitle("Test NLL at fixed prior and noise, mean over splits; lower is better", fontsize=11)
    save(figure, folder / "grid.png", legend_of=axes[0], fontsize=9)
    return ["grid.png"]


def _panel(panel: "Axes", result: Comparison) -> None:
    from matplotlib.patches import Rectangle

    best = result.best.mean
    above = [[min(value - best, WORST) for value in row] for row in result.grid]
    panel.imshow(above, origin="lower", cmap=gentle("YlGnBu", 0.0, 0.5), vmin=0.0, vmax=WORST, aspect="auto")
    for row, values in enumerate(result.grid):
        for column, value in enumerate(values):
            text = f"{value:.2f}" if abs(value) < 9.995 else f"{value:.0f}"
            text = text.replace("-", "\N{MINUS SIGN}")
            panel.text(column, row - 0.3, text, ha="center", va="center", fontsize=6.5, color=BLACK)
    corner = (NOISE_SCALES.index(result.best_noise_scale) - 0.5, PRIOR_SCALES.index(result.best_prior_scale) - 0.5)
    box = Rectangle(corner, 1.0, 1.0, fill=False, edgecolor=BLACK, linewidth=2.0, zorder=3, label="best of the grid")
    panel.add_patch(box)
    priors, noises = zip(*result.points, strict=True)
    across, up = _position(noises, NOISE_SCALES), _position(priors, PRIOR_SCALES)
    panel.scatter(
        across,
        up,
        s=9,
        color=RED,
        linewidths=0,
        zorder=4,
        label="variational EM, each split (prior: geometric mean over weights)",
    )
    prior, noise = result.point
    middle = _position([noise], NOISE_SCALES), _position([prior], PRIOR_SCALES)
    panel.scatter(*middle, s=110, color=RED, marker="*", edgecolors="white", zorder=5, label="and their mean")
    panel.set_xticks(range(SIDE), [f"{scale:.2g}" for scale in NOISE_SCALES])
    panel.set_yticks(range(SIDE), [f"{scale:.2g}" for scale in PRIOR_SCALES])
    panel.set_title(f"{result.data_set}, {result.method}\nbest {result.best}, variational EM {result.em}", fontsize=9)
    panel.set_xlim(-0.5, SIDE - 0.5)
    panel.set_ylim(-0.5, SIDE - 0.5)


def _position(values: Sequence[float], scales: Sequence[float]) -> list[float]:
    """Return the positions of values among the cells, on a log scale; values outside are moved to the edge."""
    step = math.log(scales[1] / scales[0])
    return [min(max(math.log(value / scales[0]) / step, -0.5), len(scales) - 0.5) for value in values]
