"""The figure of the study: errors of the moments of each posterior against its reference."""

from pathlib import Path

from posterity.report.canvas import BLACK, BLUE, panels, plain, save
from posterity_studies.posteriors.study import MEAN_ERRORS, SD_ERRORS, Study


def draw(study: Study, folder: Path) -> list[str]:
    """Draw the figure of the study into the folder, and give the names of the files."""
    rows = list(reversed(study.comparisons))
    figure, (panel,) = panels(1, 1, size=(7.0, 0.32 * len(rows) + 1.2))
    heights = range(len(rows))
    kinds = (
        ("mean_errors", "mean", "o", BLUE, MEAN_ERRORS),
        ("sd_errors", "standard deviation", "^", BLACK, SD_ERRORS),
    )
    for key, label, marker, colour, limit in kinds:
        panel.plot(
            [getattr(row, key) for row in rows], heights, marker, color=colour, label=f"{label}, at most {limit:g}"
        )
        panel.axvline(limit, color=colour, linewidth=0.8, linestyle=":")
    panel.set_yticks(list(heights), [f"{row.posterior}, {row.form}" for row in rows])
    panel.set_xlim(left=0.0)
    panel.set_xlabel("worst distance from the reference, in combined standard errors")
    panel.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False, fontsize=9)
    plain(panel)
    save(figure, folder / "errors.png")
    return ["errors.png"]
