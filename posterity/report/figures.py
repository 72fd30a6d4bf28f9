"""Figures of predictions: bands, maps, reliability, predicted against observed."""

import io
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from posterity.datasets import DataSet
from posterity.errors import PosterityError
from posterity.metrics import negative_log_likelihood, reliability
from posterity.posteriors import Posterior
from posterity.report.files import check_figure_path
from posterity.storage.disk import write_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

GRID = 64  # points a side of a map; bilinear shading hides the steps
BEYOND = 1.5  # the shown range, in spans of the data
COLOURS = ("#053061", "#67001f", "#276419", "#40004b", "#7f3b08", "#003c30")
MARKERS = ("o", "^", "s", "D", "v", "P")
NOISE_BAND, WEIGHT_BAND, LINE, INK = "#c6dbef", "#6baed6", "#08519c", "#222222"
Path_ = str | os.PathLike[str]


def class_probability_maps(
    panels: Mapping[str, Posterior], data: DataSet, path: Path_, nll: Mapping[str, float] | None = None
) -> None:
    """Draw p(y = 1 | x) of each posterior over a 2-D input space, well beyond the data, into one figure file.

    Takes posteriors by title, the data set (two inputs, two classes) they were fitted to, the file, and their test
    negative log-likelihoods where these are known already. The file is written whole or not at all.
    """
    classes = _classes(data)
    if len(classes) != 2:
        raise ValueError(f"class_probability_maps needs two classes. Got {len(classes)}. Use confidence_maps.")
    _maps(
        panels,
        data,
        path,
        nll,
        value=lambda probs: probs[:, 1],
        colours="RdBu_r",
        bounds=(0.0, 1.0),
        label=f"p(y = {_plain(classes[1])} | x)",
        contours={0.5: ("solid", 1.4), 0.1: ("dotted", 0.9), 0.9: ("dotted", 0.9)},
    )


def confidence_maps(
    panels: Mapping[str, Posterior], data: DataSet, path: Path_, nll: Mapping[str, float] | None = None
) -> None:
    """Draw the probability of the most probable class over a 2-D input space, well beyond the data.

    Takes what `class_probability_maps` takes, for any number of classes.
    """
    classes = _classes(data)
    _maps(
        panels,
        data,
        path,
        nll,
        value=lambda probs: probs.max(-1).values,
        colours="Purples_r",
        bounds=(1.0 / len(classes), 1.0),
        label="probability of the most probable class",
        contours={0.9: ("dotted", 0.9)},
    )


def regression_bands(
    panels: Mapping[str, Posterior], data: DataSet, path: Path_, nll: Mapping[str, float] | None = None
) -> None:
    """Draw mean and 95 % band of each posterior over a 1-D input, beyond the data, into one figure file.

    The inner band is what the weights leave open (epistemic); the outer one has the noise in it and holds 95 % of
    new targets. Takes what `class_probability_maps` takes, for data with one input and one number to predict.
    """
    if data.task != "regression" or data.train.inputs.shape[1:] != (1,) or data.train.targets.shape[1:] != (1,):
        raise ValueError(
            f"regression_bands needs regression with one input and one output. Got the data '{data.name}'."
        )
    check_figure_path(Path(path))
    x, y = data.train.inputs[:, 0], data.train.targets[:, 0]
    seen = torch.cat([x, data.test.inputs[:, 0]])
    low, high = _wider(seen, 1.25)
    grid = torch.linspace(low, high, 300)
    figure, axes = _figure(len(panels), width=4.2, height=3.15)
    bottom, top = _wider(torch.cat([y, data.test.targets[:, 0]]), 1.3)
    for place, (title, posterior) in zip(axes, panels.items(), strict=True):
        predictive = posterior.predict(grid[:, None])
        mean, half = _array(predictive.mean[:, 0]), _array(1.96 * predictive.epistemic[:, 0].sqrt())
        lower, upper = (_array(value[:, 0]) for value in predictive.interval(0.95))
        place.fill_between(_array(grid), lower, upper, color=NOISE_BAND, linewidth=0, label="95 % of targets (total)")
        if (half > 0).any():
            label = "95 % of functions (epistemic)"
            place.fill_between(_array(grid), mean - half, mean + half, color=WEIGHT_BAND, linewidth=0, label=label)
        place.plot(_array(grid), mean, color=LINE, linewidth=1.6, label="mean")
        place.scatter(_array(x), _array(y), s=10, color=INK, linewidth=0, alpha=0.8, zorder=3, label="training rows")
        place.set(xlim=(low, high), ylim=(bottom, top), xlabel="x")
        _title(place, title, posterior, data, nll)
    axes[0].set_ylabel("y")
    handles = {
        label: handle for place in axes for handle, label in zip(*place.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    _write(figure, path)


def comparison(
    panels: Mapping[str, Posterior], data: DataSet, path: Path_, nll: Mapping[str, float] | None = None
) -> None:
    """Draw the figure that suits the data: probability maps, confidence maps or bands."""
    if data.task == "regression":
        regression_bands(panels, data, path, nll)
    elif len(_classes(data)) == 2:
        class_probability_maps(panels, data, path, nll)
    else:
        confidence_maps(panels, data, path, nll)


def _maps(
    panels: Mapping[str, Posterior],
    data: DataSet,
    path: Path_,
    nll: Mapping[str, float] | None,
    *,
    value: Any,
    colours: str,
    bounds: tuple[float, float],
    label: str,
    contours: Mapping[float, tuple[str, float]],
) -> None:
    if data.train.inputs.shape[1:] != (2,):
        raise ValueError(
            f"A map needs data with two inputs. Got {tuple(data.train.inputs.shape[1:])} in '{data.name}'."
        )
    check_figure_path(Path(path))
    sides = _square(data.train.inputs)
    axis = [torch.linspace(low, high, GRID) for low, high in sides]
    grid = torch.cartesian_prod(axis[0], axis[1])  # (GRID^2, 2), second input fastest
    places = [_array(values) for values in axis]
    half = 0.5 * (sides[0][1] - sides[0][0]) / (GRID - 1)  # a pixel reaches half a step around its point
    extent = (sides[0][0] - half, sides[0][1] + half, sides[1][0] - half, sides[1][1] + half)
    figure, axes = _figure(len(panels), width=4.0, height=3.9)
    for place, (title, posterior) in zip(axes, panels.items(), strict=True):
        probs = posterior.predict(grid).probs.cpu()
        shown = _array(value(probs).reshape(GRID, GRID).T)  # rows are the second input
        image = place.imshow(
            shown,
            origin="lower",
            extent=extent,
            cmap=_gentle(colours),
            vmin=bounds[0],
            vmax=bounds[1],
            interpolation="bilinear",
        )
        for level, (style, width) in contours.items():
            if shown.min() < level < shown.max():
                place.contour(*places, shown, levels=[level], colors=INK, linestyles=style, linewidths=width)
        if len(_classes(data)) > 2:
            for lead in _array(_leads(probs)):
                if lead.min() < 0 < lead.max():
                    place.contour(*places, lead.reshape(GRID, GRID).T, levels=[0.0], colors=INK, linewidths=1.2)
        _points(place, data)
        place.set(xlim=sides[0], ylim=sides[1], xlabel="$x_1$", aspect="equal")
        _title(place, title, posterior, data, nll)
    axes[0].set_ylabel("$x_2$")
    bar = figure.colorbar(image, ax=axes, shrink=0.9, pad=0.02)
    bar.set_label(label, fontsize=10)
    handles, names = axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=len(names), frameon=False, fontsize=9)
    _write(figure, path)


def _gentle(name: str) -> "Colormap":
    """The named colours without their darkest ends, on which points could not be seen."""
    from matplotlib import colormaps
    from matplotlib.colors import LinearSegmentedColormap

    ends = (0.15, 0.85) if name == "RdBu_r" else (0.1, 1.0)
    shades = colormaps[name](torch.linspace(*ends, 256).numpy())
    return LinearSegmentedColormap.from_list(f"gentle {name}", shades)


def _leads(probs: Tensor) -> Tensor:
    """By how much each class is more probable than the best other one, (C, N): its zero is the class's border."""
    top = probs.topk(2).values  # (N, 2)
    others = torch.where(probs == top[:, :1], top[:, 1:], top[:, :1])
    return (probs - others).T


def _points(place: "Axes", data: DataSet) -> None:
    for index, name in enumerate(_classes(data)):
        rows = _array(data.train.inputs[data.train.targets == index])
        place.scatter(
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
    """A figure with a row of panels, no global state behind it."""
    if not count:
        raise ValueError("A figure needs at least one panel. Got no posterior.")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PosterityError("Figures need matplotlib. Install it with: pip install 'posterity[report]'.") from error
    figure = Figure(figsize=(width * count + 0.9, height + 0.75), dpi=150, layout="compressed")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, count, sharex=True, sharey=True, squeeze=False)
    return figure, list(axes[0])


def _title(place: "Axes", title: str, posterior: Posterior, data: DataSet, nll: Mapping[str, float] | None) -> None:
    if nll is None:
        value = negative_log_likelihood(posterior.predict(data.test.inputs), data.test.targets)
    else:
        value = nll[title]
    place.set_title(f"{title}   test NLL {value:.3f}", fontsize=11)
    place.tick_params(labelsize=9)


def _write(figure: "Figure", path: Path_) -> None:
    path = Path(path)
    buffer = io.BytesIO()
    figure.savefig(buffer, format=path.suffix.lower().removeprefix("."), bbox_inches="tight", pad_inches=0.1)
    write_file(path, buffer.getvalue())


def _classes(data: DataSet) -> tuple[str, ...]:
    if data.classes is None:
        raise ValueError(f"This figure needs data with classes. Got '{data.name}', a regression. Use regression_bands.")
    return data.classes


def _plain(name: str) -> str:
    """A name from the data, none of it taken for maths."""
    return name.replace("$", r"\$")


def _array(values: Tensor) -> "NDArray[Any]":
    return values.detach().cpu().numpy()


def _wider(values: Tensor, factor: float) -> tuple[float, float]:
    """The range of the values, stretched by `factor` around its middle."""
    low, high = float(values.min()), float(values.max())
    half = 0.5 * (high - low) * factor or 1.0
    return 0.5 * (low + high) - half, 0.5 * (low + high) + half


def _square(inputs: Tensor) -> list[tuple[float, float]]:
    """Equal ranges of both inputs around the data, BEYOND their larger span to each side of the middle."""
    low, high = inputs.amin(0), inputs.amax(0)
    half = math.ceil(BEYOND * float((high - low).max()))
    return [(round(float(middle)) - half, round(float(middle)) + half) for middle in 0.5 * (low + high)]


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
