"""The figures of the study: each metric by data set, ours beside the published ones."""

from pathlib import Path
from typing import TYPE_CHECKING

from posterity.report.canvas import BLACK, BLUE, GREEN, GREY, ORANGE, PINK, RED, SKY, panels, plain, save
from posterity_studies.uci.study import METRICS, Row, Study

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OURS = (BLUE, RED, GREEN, ORANGE, PINK, SKY)
COLUMNS = 4


def draw(study: Study, folder: Path) -> list[str]:
    """Draw NLL and RMSE into the folder, and give the names of the files."""
    figures = {"nll.png": "test_nll", "rmse.png": "test_rmse"}
    for name, metric in figures.items():
        _means(study, metric, folder / name)
    return list(figures)


def _means(study: Study, metric: str, path: Path) -> None:
    """A panel for each data set, as their units differ; in it a line for each method: mean and one standard error."""
    rows = [row for row in study.rows if metric in row.scores]
    lines = list(dict.fromkeys(row.method for row in sorted(rows, key=lambda row: row.published)))
    count = len(study.data_sets)
    columns = min(count, COLUMNS)
    figure, axes = panels(-(-count // columns), columns, size=(3.4, 0.9 + 0.27 * len(lines)), sharey=True)
    for panel, name in zip(axes, study.data_sets, strict=False):
        _panel(panel, name, [row for row in rows if row.data_set == name], lines, metric)
    axes[0].set_ylim(len(lines) - 0.5, -0.5)
    for panel in axes[count:]:
        panel.set_axis_off()
    figure.suptitle(
        f"Test {METRICS[metric]} on the standard UCI splits: mean and standard error over splits, lower is better. "
        "Grey: published",
        fontsize=10,
    )
    save(figure, path)


def _panel(panel: "Axes", name: str, rows: list[Row], lines: list[str], metric: str) -> None:
    ours = [row for row in rows if not row.published]
    for row in rows:
        result = row.scores[metric]
        panel.errorbar(
            result.mean,
            lines.index(row.method),
            xerr=result.error,
            fmt="s" if row.published else "o",
            color=GREY if row.published else OURS[lines.index(row.method) % len(OURS)],
            markersize=5,
            capsize=3,
            linewidth=1.4,
        )
    best = min(row.scores[metric].mean for row in ours)
    panel.axvline(best, color=BLACK, linewidth=0.7, linestyle="dotted", zorder=0)
    panel.set_yticks(range(len(lines)), lines)
    panel.set_title(f"{name}, {ours[0].splits} split{'s' * (ours[0].splits != 1)}", fontsize=10)
    panel.margins(x=0.12)
    panel.locator_params(axis="x", nbins=5)
    plain(panel)
