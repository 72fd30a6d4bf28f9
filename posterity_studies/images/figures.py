"""The figures of the study: held-out scores against eta, and test scores by method."""

from pathlib import Path
from typing import TYPE_CHECKING

from posterity.report.canvas import BLACK, BLUE, GREY, ORANGE, RED, panels, plain, save
from posterity_studies.images.study import METRICS, NETWORKS, Row, Study

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {"MAP": GREY, "MeanField, chosen": BLUE, "MeanField": ORANGE}


def draw(study: Study, folder: Path) -> list[str]:
    """Draw both figures into the folder, and give the names of the files."""
    _grid(study, folder / "eta.png")
    _scores(study, folder / "scores.png")
    return ["eta.png", "scores.png"]


def _grid(study: Study, path: Path) -> None:
    """A row of panels for each network: every score on the held-out images, and the mean scale, against eta."""
    networks = list(study.chosen)
    figure, axes = panels(len(networks), len(METRICS) + 1, size=(3.2, 2.6))
    for row, network in enumerate(networks):
        result = study.grid(network)
        etas = sorted(eta for eta in result if eta is not None)
        panels_of_row = axes[row * (len(METRICS) + 1) :]
        for panel, (key, label) in zip(panels_of_row, METRICS.items(), strict=False):
            values = [result[eta].scores[f"held_out_{key}"] for eta in etas]
            panel.axhline(result[None].scores[f"held_out_{key}"], color=BLACK, linestyle="dashed", label="MAP")
            _curve(panel, etas, values, study.chosen[network], label)
        scales = [result[eta].scores["mean_scale"] for eta in etas]
        _curve(panels_of_row[len(METRICS)], etas, scales, study.chosen[network], r"mean $\sigma$ of the weights")
        panels_of_row[len(METRICS)].axhline(study.settings.prior_scale, color=GREY, linestyle="dotted", label="prior")
        panels_of_row[0].set_title(NETWORKS[network].label, fontsize=11, loc="left")
        panels_of_row[0].legend(frameon=False, fontsize=9)
        panels_of_row[len(METRICS)].legend(frameon=False, fontsize=9)
    for panel in axes[-len(METRICS) - 1 :]:
        panel.set_xlabel(r"$\eta$, the weight of the KL", fontsize=10)
    count = f"{study.settings.held_out:,} held-out training images"
    figure.suptitle(f"{study.settings.data_set}, first seed, {count}. Red: chosen, by NLL", fontsize=11)
    save(figure, path)


def _curve(panel: "Axes", etas: list[float], values: list[float], chosen: float, label: str) -> None:
    panel.plot(etas, values, "o-", color=BLUE, markersize=4, linewidth=1.4, label="mean field")
    panel.plot([chosen], [values[etas.index(chosen)]], "o", color=RED, markersize=8, zorder=3)
    panel.set_xscale("log")
    panel.set_ylabel(label, fontsize=10)
    plain(panel)


def _scores(study: Study, path: Path) -> None:
    """A row of panels for each network: mean and standard deviation over seeds of each score on the test images."""
    networks = list(study.chosen)
    figure, axes = panels(len(networks), len(METRICS), size=(3.4, 1.9))
    for row, network in enumerate(networks):
        rows = study.rows(network)
        for panel, (key, label) in zip(axes[row * len(METRICS) :], METRICS.items(), strict=False):
            for line, scored in enumerate(rows):
                mean, spread = scored.scores[f"test_{key}"]
                panel.errorbar(mean, line, xerr=spread, fmt="o", color=COLOURS[scored.method], capsize=3, markersize=6)
            panel.set(xlabel=label, ylim=(len(rows) - 0.5, -0.5))
            panel.set_yticks(range(len(rows)), [method_name(member) for member in rows] if key == "error" else [])
            panel.margins(x=0.15)
            panel.locator_params(axis="x", nbins=4)
            plain(panel)
        axes[row * len(METRICS)].set_title(NETWORKS[network].label, fontsize=11, loc="left")
    seeds = f"mean and standard deviation over {study.settings.seeds} seeds" if study.settings.seeds > 1 else "one seed"
    figure.suptitle(f"{study.settings.data_set}, test images, {seeds}. Less is better", fontsize=11)
    save(figure, path)


def method_name(row: Row) -> str:
    """The method of a row with its eta."""
    return row.method if row.eta is None else rf"mean field, $\eta$ = {row.eta:g}"
