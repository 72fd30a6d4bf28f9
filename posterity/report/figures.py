"""Figures of predictions: bands, maps, reliability, predicted against observed."""

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from posterity.datasets import DataSet
from posterity.metrics import negative_log_likelihood, reliability
from posterity.predictive import Predictive
from posterity.report import canvas
from posterity.report.canvas import ORANGE, array
from posterity.report.files import check_figure_path

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GRID = 96  # points a side of a map; bilinear shading hides the steps
MOST_DOTS = 250  # test rows in a figure of bands; more hide it
BEYOND = 1.5  # the shown range, in ranges of the data
COLOURS = ("#053061", "#67001f", "#276419", "#40004b", "#7f3b08", "#003c30")
MARKERS = ("o", "^", "s", "D", "v", "P")
NOISE_BAND, WEIGHT_BAND, LINE, INK = "#c6dbef", "#6baed6", "#08519c", canvas.BLACK
Path_ = str | os.PathLike[str]


class Predictor(Protocol):
    """The interface of posteriors that figures use."""

    def predict(self, inputs: Tensor) -> Predictive:
        """Return the predictive of the targets at these inputs."""
        ...


Panels = Mapping[str, Predictor]
Scores = Mapping[str, float]
Lines = Mapping[str, str]


def class_probability_maps(
    panels: Panels, data: DataSet, path: Path_, nll: Scores | None = None, lines: Lines | None = None
) -> None:
    """Draw p(y = 1 | x) of each posterior over a 2-D input space, well beyond the data, into one figure file.

    Takes posteriors by title, the data set (two inputs, two classes) they were fitted to, the file, their test
    negative log-likelihoods where these are known already, and a second line for each title. The file is written whole
    or not at all.
    """
    classes = _classes(data)
    if len(classes) != 2:
        raise ValueError(f"class_probability_maps needs two classes. Got {len(classes)}. Use confidence_maps.")
    _maps(
        panels,
        data,
        path,
        nll,
        lines,
        value=lambda probs: probs[:, 1],
        colours=("RdBu_r", 0.15, 0.85),
        bounds=(0.0, 1.0),
        label=f"p(y = {_plain(classes[1])} | x)",
        contours={0.5: ("solid", 1.4), 0.1: ("dotted", 0.9), 0.9: ("dotted", 0.9)},
    )


def confidence_maps(
    panels: Panels, data: DataSet, path: Path_, nll: Scores | None = None, lines: Lines | None = None
) -> None:
    """Draw the probability of the most probable class over a 2-D input space, well beyond the data.

    Takes what `class_probability_maps` takes, for any number of classes.
    """
    _maps(
        panels,
        data,
        path,
        nll,
        lines,
        value=lambda probs: probs.max(-1).values,
        colours=("Purples_r", 0.1, 1.0),
        bounds=(1.0 / len(_classes(data)), 1.0),
        label="probability of the most probable class",
        contours={0.9: ("dotted", 0.9)},
    )


def regression_bands(
    panels: Panels, data: DataSet, path: Path_, nll: Scores | None = None, lines: Lines | None = None
) -> None:
    """Draw mean and 95 % band of each posterior over a 1-D input, beyond the data, into one figure file.

    The inner band is the epistemic uncertainty of the function; the outer one includes the noise and holds 95 % of new
    targets. Takes what `class_probability_maps` takes, for data with one input and one number to predict.
    """
    if data.task != "regression" or data.train.inputs.shape[1:] != (1,) or data.train.targets.shape[1:] != (1,):
        raise ValueError(
            f"regression_bands needs regression with one input and one output. Got the data '{data.name}'."
        )
    check_figure_path(Path(path))
    x, y = data.train.inputs[:, 0], data.train.targets[:, 0]
    seen = torch.cat([x, data.test.inputs[:, 0]])
    low, high = wider(seen, 1.25)
    grid = torch.linspace(low, high, 300)
    figure, axes = _figure(len(panels), width=4.2, height=3.15)
    bottom, top = wider(torch.cat([y, data.test.targets[:, 0]]), 1.3)
    step = math.ceil(len(data.test) / MOST_DOTS)
    shown = [array(values[::step, 0]) for values in data.test.pair]
    for panel, (title, posterior) in zip(axes, panels.items(), strict=True):
        predictive = posterior.predict(grid[:, None])
        mean, half = array(predictive.mean[:, 0]), array(1.96 * predictive.epistemic[:, 0].sqrt())
        lower, upper = (array(value[:, 0]) for value in predictive.interval(0.95))
        panel.fill_between(array(grid), lower, upper, color=NOISE_BAND, linewidth=0, label="95 % of targets (total)")
        if (half > 0).any():
            label = "95 % of functions (epistemic)"
            panel.fill_between(array(grid), mean - half, mean + half, color=WEIGHT_BAND, linewidth=0, label=label)
        panel.plot(array(grid), mean, color=LINE, linewidth=1.6, label="mean")
        panel.scatter(array(x), array(y), s=12, color=INK, linewidth=0, alpha=0.85, zorder=3, label="training rows")
        panel.plot(*shown, ".", color=ORANGE, markersize=2.5, alpha=0.8, zorder=2.5, label="test rows")
        panel.set(xlim=(low, high), ylim=(bottom, top), xlabel="x")
        canvas.plain(panel)
        _title(panel, title, posterior, data, nll, lines)
        panel.xaxis.label.set_fontsize(11)
    axes[0].set_ylabel("y", fontsize=11)
    _save(figure, path, axes, 3 if len(axes) < 3 else None)


def comparison(
    panels: Panels, data: DataSet, path: Path_, nll: Scores | None = None, lines: Lines | None = None
) -> None:
    """Draw the figure that suits the data: probability maps, confidence maps or bands."""
    if data.task == "regression":
        regression_bands(panels, data, path, nll, lines)
    elif len(_classes(data)) == 2:
        class_probability_maps(panels, data, path, nll, lines)
    else:
        confidence_maps(panels, data, path, nll, lines)


def _maps(
    panels: Panels,
    data: DataSet,
    path: Path_,
    nll: Scores | None,
    lines: Lines | None,
    *,
    value: Any,
    colours: tuple[str, float, float],
    bounds: tuple[float, float],
    label: str,
    contours: Mapping[float, tuple[str, float]],
) -> None:
    if data.train.inputs.shape[1:] != (2,):
        raise ValueError(
            f"A map needs data with two inputs. Got {tuple(data.train.inputs.shape[1:])} in '{data.name}'."
        )
    check_figure_path(Path(path))
    sides = square(data.train.inputs)
    axis = [torch.linspace(low, high, GRID) for low, high in sides]
    grid = torch.cartesian_prod(axis[0], axis[1])  # (GRID^2, 2), second input fastest
    coordinates = [array(values) for values in axis]
    half = 0.5 * (sides[0][1] - sides[0][0]) / (GRID - 1)  # a pixel reaches half a step around its point
    extent = (sides[0][0] - half, sides[0][1] + half, sides[1][0] - half, sides[1][1] + half)
    figure, axes = _figure(len(panels), width=4.0, height=3.9)
    image: Any = None  # of the last panel; `_figure` refuses none
    for panel, (title, posterior) in zip(axes, panels.items(), strict=True):
        probs = posterior.predict(grid).probs.cpu()
        shown = array(value(probs).reshape(GRID, GRID).T)  # rows are the second input
        shades: dict[str, Any] = {"cmap": canvas.gentle(*colours), "vmin": bounds[0], "vmax": bounds[1]}
        image = panel.imshow(shown, origin="lower", extent=extent, interpolation="bilinear", **shades)
        for level, (style, width) in contours.items():
            if shown.min() < level < shown.max():
                panel.contour(*coordinates, shown, levels=[level], colors=INK, linestyles=style, linewidths=width)
        if len(_classes(data)) > 2:
            for lead in array(class_margins(probs)):
                if lead.min() < 0 < lead.max():
                    panel.contour(*coordinates, lead.reshape(GRID, GRID).T, levels=[0.0], colors=INK, linewidths=1.2)
        _points(panel, data)
        panel.set(xlim=sides[0], ylim=sides[1], aspect="equal")
        panel.set_xlabel("$x_1$", fontsize=11)
        _title(panel, title, posterior, data, nll, lines)
    axes[0].set_ylabel("$x_2$", fontsize=11)
    bar = figure.colorbar(image, ax=axes, shrink=0.9, pad=0.02)
    bar.set_label(label, fontsize=11)
    for level, (style, width) in contours.items():
        bar.ax.axhline(level, color=INK, linestyle=style, linewidth=width)  # what the contours are
    _save(figure, path, axes[:1])


def class_margins(probs: Tensor) -> Tensor:
    """Return the probability of each class minus the largest of the others, (C, N): zero at its decision boundary."""
    top = probs.topk(2).values  # (N, 2)
    others = torch.where(probs == top[:, :1], top[:, 1:], top[:, :1])
    return (probs - others).T


def _points(panel: "Axes", data: DataSet) -> None:
    for index, name in enumerate(_classes(data)):
        rows = array(data.train.inputs[data.train.targets == index])
        panel.scatter(
            rows[:, 0],
            rows[:, 1],
            s=9,
            marker=MARKERS[index % len(MARKERS)],
            color=COLOURS[index % len(COLOURS)],
            edgecolor="white",
            linewidth=0.3,
            label=f"training rows: {_plain(name)}",
        )


def _figure(count: int, *, width: float, height: float) -> tuple["Figure", list["Axes"]]:
    """Return a figure with a row of panels."""
    if not count:
        raise ValueError("A figure needs at least one panel. Got no posterior.")
    size, beside = (width, height), (0.9, 0.75)
    return canvas.panels(1, count, size=size, beside=beside, layout="compressed", sharex=True, sharey=True)


def _title(
    panel: "Axes", title: str, posterior: Predictor, data: DataSet, nll: Scores | None, lines: Lines | None
) -> None:
    test = data.test
    value = negative_log_likelihood(posterior.predict(test.inputs), test.targets) if nll is None else nll[title]
    second = lines.get(title) if lines else None
    panel.set_title(f"{title}   test NLL {value:.3f}", fontsize=12, pad=22 if second else None)
    if second:
        place: dict[str, Any] = {"xytext": (0, 6), "textcoords": "offset points", "ha": "center", "va": "bottom"}
        panel.annotate(second, (0.5, 1.0), xycoords="axes fraction", fontsize=10, **place)


def _save(figure: "Figure", path: Path_, legend_of: list["Axes"], columns: int | None = None) -> None:
    """Write the figure with a legend of all labels in these panels below it."""
    labelled = (zip(*panel.get_legend_handles_labels(), strict=True) for panel in legend_of)
    handles = {label: handle for pairs in labelled for handle, label in pairs}
    ncols = columns or len(handles)
    figure.legend(
        handles.values(),
        handles.keys(),
        loc="outside lower center",
        ncols=ncols,
        frameon=False,
        fontsize=10,
        markerscale=2,
    )
    canvas.save(figure, Path(path), margin=0.1)


def _classes(data: DataSet) -> tuple[str, ...]:
    if data.classes is None:
        raise ValueError(f"This figure needs data with classes. Got '{data.name}', a regression. Use regression_bands.")
    return data.classes


def _plain(name: str) -> str:
    """Escape a name from the data, so that matplotlib reads no maths in it."""
    return name.replace("$", r"\$")


def wider(values: Tensor, factor: float) -> tuple[float, float]:
    """Return the range of the values, stretched by `factor` around its middle."""
    low, high = float(values.min()), float(values.max())
    half = 0.5 * (high - low) * factor or 1.0
    return 0.5 * (low + high) - half, 0.5 * (low + high) + half


def square(inputs: Tensor) -> list[tuple[float, float]]:
    """Return equal ranges of both inputs, BEYOND times their larger range to each side of the middle."""
    low, high = inputs.amin(0), inputs.amax(0)
    half = math.ceil(BEYOND * float((high - low).max()))
    return [(round(float(middle)) - half, round(float(middle)) + half) for middle in 0.5 * (low + high)]


BINS = 15  # as in the expected calibration error
MOST_INTERVALS = 150  # more of them hide each other


def reliability_diagram(panels: Panels, data: DataSet, path: Path_) -> None:
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
    for panel, (title, posterior) in zip(axes, panels.items(), strict=True):
        table = reliability(posterior.predict(data.test.inputs), data.test.targets, BINS)
        some = table.count > 0
        confidence, accuracy = array(table.confidence[some]), array(table.accuracy[some])
        share = array(table.count[some] / table.count.sum())
        panel.plot((0, 1), (0, 1), color=INK, linewidth=1, linestyle="dashed", label="calibrated")
        panel.vlines(confidence, confidence, accuracy, color=WEIGHT_BAND, linewidth=2, label="gap")
        dots = panel.scatter(confidence, accuracy, s=14 + 260 * share, color=LINE, alpha=0.85, linewidth=0, zorder=3)
        dots.set_clip_on(False)  # a bin of accuracy 1 lies on the border
        panel.set(xlim=(1.0 / len(data.classes) - 0.02, 1.01), ylim=(-0.02, 1.02), xlabel="confidence")
        panel.set_title(title, fontsize=11)
    axes[0].set_ylabel("accuracy")
    _save(figure, path, axes[:1], 2)


def predicted_observed(
    panels: Panels, data: DataSet, path: Path_, *, scale: float = 1.0, shift: float = 0.0, log: bool = False
) -> None:
    """Draw predicted means and 95 % intervals against the targets of the test rows, into one figure file.

    Takes what `reliability_diagram` takes, for data with one number to predict, and what turns targets into the units
    to show: value * scale + shift, or with `log` its exponential, on log axes and with medians for means. No more than
    MOST_INTERVALS rows are drawn, evenly spaced in their order.
    """
    if data.task != "regression" or data.test.targets.shape[1:] != (1,):
        raise ValueError(f"predicted_observed needs regression with one output. Got the data '{data.name}'.")
    check_figure_path(Path(path))
    count = min(len(data.test), MOST_INTERVALS)
    rows = torch.linspace(0, len(data.test) - 1, count).round().long()

    def units(values: Tensor) -> Tensor:
        shown = values[:, 0].cpu() * scale + shift
        return shown.exp() if log else shown

    observed = units(data.test.targets[rows])
    figure, axes = _figure(len(panels), width=3.4, height=3.4)
    shown = [observed]
    for panel, (title, posterior) in zip(axes, panels.items(), strict=True):
        predictive = posterior.predict(data.test.inputs[rows])
        middle = units(predictive.quantile(0.5) if log else predictive.mean)
        shown.append(middle)
        lower, upper = map(units, predictive.interval(0.95))
        inside = (lower <= observed) & (observed <= upper)
        for chosen, colour, label in ((inside, WEIGHT_BAND, "95 % interval"), (~inside, "#cb181d", "missed")):
            at = array(observed[chosen])
            panel.vlines(at, array(lower[chosen]), array(upper[chosen]), color=colour, linewidth=1.1, label=label)
        name = "median" if log else "mean"
        panel.scatter(array(observed), array(middle), s=8, color=LINE, linewidth=0, zorder=3, label=name)
        ends = (float(observed.min()), float(observed.max()))
        panel.plot(ends, ends, color=INK, linewidth=1, linestyle="dashed")
        panel.set(xlabel="observed", aspect="equal")
        if log:
            panel.set(xscale="log", yscale="log")
        else:
            panel.locator_params(axis="x", nbins=4)  # large numbers need room
        panel.set_title(title, fontsize=11)
    drawn = torch.cat(shown).log() if log else torch.cat(shown)
    low, high = wider(drawn, 1.25)
    limits = (math.exp(low), math.exp(high)) if log else (low, high)
    axes[0].set(ylabel="predicted", xlim=limits, ylim=limits)  # long intervals may leave the panel
    _save(figure, path, axes[:1], 3)
