"""Pictures of how predictions agree with the test rows, for any number of inputs."""

from collections.abc import Mapping
from pathlib import Path

import torch

from posterity.datasets import DataSet
from posterity.metrics import reliability
from posterity.posteriors import Posterior
from posterity.report.figures import INK, LINE, WEIGHT_BAND, Path_, _array, _figure, _write
from posterity.report.files import check_figure_path

BINS = 15  # those of the expected calibration error
MOST_INTERVALS = 150  # more of them hide each other


def reliability_diagram(panels: Mapping[str, Posterior], data: DataSet, path: Path_) -> None:
    """Draw the accuracy of each posterior against its confidence on the test rows, bin by bin, into one figure file.

    Takes posteriors by title, the data set (with classes) they were fitted to, and the file, which is written whole or
    not at all. The area of a dot is the share of the rows in its bin.
    """
    if data.classes is None:
        raise ValueError(
            f"reliability_diagram needs data with classes. Got '{data.name}', a regression. Use predicted_observed."
        )
    check_figure_path(Path(path))
    figure, axes = _figure(len(panels), width=3.4, height=2.9)
    for place, (title, posterior) in zip(axes, panels.items(), strict=True):
        table = reliability(posterior.predict(data.test.inputs), data.test.targets, BINS)
        some = table.count > 0
        confidence, accuracy = _array(table.confidence[some]), _array(table.accuracy[some])
        share = _array(table.count[some] / table.count.sum())
        place.plot((0, 1), (0, 1), color=INK, linewidth=1, linestyle="dashed", label="calibrated")
        place.vlines(confidence, confidence, accuracy, color=WEIGHT_BAND, linewidth=2, label="gap")
        dots = place.scatter(confidence, accuracy, s=14 + 260 * share, color=LINE, alpha=0.85, linewidth=0, zorder=3)
        dots.set_clip_on(False)  # a bin that is all right sits on the border
        low = 1.0 / len(data.classes) - 0.02
        place.set(xlim=(low, 1.01), ylim=(-0.02, 1.02), xlabel="confidence")
        place.set_title(title, fontsize=11)
        place.tick_params(labelsize=9)
    axes[0].set_ylabel("accuracy")
    handles, names = axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    _write(figure, path)


def predicted_observed(
    panels: Mapping[str, Posterior], data: DataSet, path: Path_, *, scale: float = 1.0, shift: float = 0.0
) -> None:
    """Draw predicted means and 95 % intervals against the targets of the test rows, into one figure file.

    Takes what `reliability_diagram` takes, for data with one number to predict, and what turns targets into the units
    to show: value * scale + shift. No more than MOST_INTERVALS rows are drawn, evenly spaced in their order.
    """
    if data.task != "regression" or data.test.targets.shape[1:] != (1,):
        raise ValueError(f"predicted_observed needs regression with one output. Got the data '{data.name}'.")
    check_figure_path(Path(path))
    count = min(len(data.test), MOST_INTERVALS)
    rows = torch.linspace(0, len(data.test) - 1, count).round().long()
    observed = data.test.targets[rows, 0].cpu() * scale + shift
    figure, axes = _figure(len(panels), width=3.6, height=3.1)
    for place, (title, posterior) in zip(axes, panels.items(), strict=True):
        predictive = posterior.predict(data.test.inputs[rows])
        mean = predictive.mean[:, 0].cpu() * scale + shift
        lower, upper = (value[:, 0].cpu() * scale + shift for value in predictive.interval(0.95))
        inside = (lower <= observed) & (observed <= upper)
        for chosen, colour, label in ((inside, WEIGHT_BAND, "95 % interval"), (~inside, "#cb181d", "missed")):
            at = _array(observed[chosen])
            place.vlines(at, _array(lower[chosen]), _array(upper[chosen]), color=colour, linewidth=1.1, label=label)
        place.scatter(_array(observed), _array(mean), s=8, color=LINE, linewidth=0, zorder=3, label="mean")
        place.axline((float(observed[0]), float(observed[0])), slope=1, color=INK, linewidth=1, linestyle="dashed")
        place.set(xlabel="observed")
        place.locator_params(axis="x", nbins=4)  # large numbers need room
        place.set_title(title, fontsize=11)
        place.tick_params(labelsize=9)
    axes[0].set_ylabel("predicted")
    handles, names = axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    _write(figure, path)
