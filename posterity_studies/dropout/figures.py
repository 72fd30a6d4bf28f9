"""The figures of the study."""

from pathlib import Path

import torch

from posterity.report.canvas import BLACK, BLUE, GREEN, GREY, ORANGE, RED, SKY, array, gentle, panels, plain, save
from posterity_studies.dropout import enumeration as masks
from posterity_studies.dropout import training
from posterity_studies.dropout.study import Study
from posterity_studies.frame import draw_all

TWO = (("upper", "#053061", "o"), ("lower", "#67001f", "^"))  # the dark ends of the map's own colours
COLOURS = (BLUE, SKY, ORANGE, RED)


def draw(study: Study, folder: Path) -> list[str]:
    """Draw the figures of the study into the folder; return the names of the files."""
    figures = {
        "regression.png": _regression,
        "moons.png": _moons,
        "enumeration.png": _enumeration,
        "divergence.png": _divergence,
        "training.png": _training,
    }
    return draw_all(figures, study, folder)


def _regression(study: Study, path: Path) -> None:
    result = study.regression
    figure, axes = panels(1, 3, size=(4.2, 3.9), sharex=True, sharey=True)
    x = array(result.axis)
    for panel, (name, curve) in zip(axes, result.curves.items(), strict=True):
        mean = curve.mean
        for scale, shade, label in (
            (2 * curve.target_scale, 0.18, "± 2 standard deviations of y"),
            (2 * curve.function_scale, 0.45, "± 2 standard deviations of f"),
        ):
            panel.fill_between(
                x, array(mean - scale), array(mean + scale), color=BLUE, alpha=shade, linewidth=0, label=label
            )
        panel.plot(x, array(mean), color=BLUE, linewidth=1.8, label="mean")
        truth = torch.sin(result.axis) + result.axis
        panel.plot(x, array(truth), color=BLACK, linewidth=1.2, linestyle="dashed", label="sin(x) + x")
        rows = result.data.train
        panel.plot(
            array(rows.inputs[:, 0]), array(rows.targets[:, 0]), ".", color=RED, markersize=4, label="training rows"
        )
        kind, numbers = "learnt" if "learnt" in name else "given", ", ".join(f"{rate:.2f}" for rate in curve.rates)
        panel.set_title(f"MC dropout, {kind} rates {numbers}" if curve.rates else name, fontsize=11)
        panel.set(xlabel="x", xlim=(float(result.axis[0]), float(result.axis[-1])), ylim=(-9, 9))
        plain(panel)
    axes[0].set_ylabel("y")
    save(figure, path, legend_of=axes[-1], ncols=5)


def _moons(study: Study, path: Path) -> None:
    result = study.classification
    figure, axes = panels(2, 2, size=(4.0, 3.9), sharex=True, sharey=True)
    first, second = result.axes
    extent = (float(first[0]), float(first[-1]), float(second[0]), float(second[-1]))
    kinds = (
        ("probability", gentle("RdBu_r", 0.15, 0.85), 1.0, "p(lower | x);  lines at 0.1, 0.5, 0.9"),
        ("entropy", gentle("Greys", 0.0, 0.75), float(torch.log(torch.tensor(2.0))), "entropy of the label, nats"),
    )
    for row, (kind, colours, highest, label) in enumerate(kinds):
        for column, (name, entropies) in enumerate(result.maps.items()):
            panel = axes[2 * row + column]
            shown = array(getattr(entropies, kind).reshape(len(first), len(second)).T)  # rows are the second input
            panel.imshow(
                shown, origin="lower", extent=extent, cmap=colours, vmin=0, vmax=highest, interpolation="bilinear"
            )
            if kind == "probability":
                grid = array(first), array(second), shown
                panel.contour(*grid, levels=[0.1, 0.9], colors=BLACK, linestyles="dotted", linewidths=0.9)
                panel.contour(*grid, levels=[0.5], colors=BLACK, linewidths=1.4)
                panel.set_title(f"{name}: test NLL {entropies.test_nll:.3f}", fontsize=11)
            for index, (title, colour, marker) in enumerate(TWO):
                rows = result.data.train.inputs[result.data.train.targets == index]
                panel.scatter(
                    array(rows[:, 0]), array(rows[:, 1]), s=9, color=colour, marker=marker, linewidths=0, label=title
                )
            panel.set_aspect("equal")
        bar = figure.colorbar(axes[2 * row].images[0], ax=axes[2 * row : 2 * row + 2], shrink=0.85, pad=0.02)
        bar.set_label(label, fontsize=10)
    for panel in axes[2:]:
        panel.set_xlabel("$x_1$")
    for panel in axes[::2]:
        panel.set_ylabel("$x_2$")
    save(figure, path, legend_of=axes[0], ncols=2)


def _enumeration(study: Study, path: Path) -> None:
    result = study.enumeration
    figure, axes = panels(1, 3, size=(4.2, 3.8))
    y = array(result.y)
    axes[0].plot(y, array(result.log_density.exp()), color=BLUE, linewidth=2.0, label=f"all {result.masks:,} masks")
    axes[0].plot(
        y,
        array(result.moment_matched_log_density.exp()),
        color=RED,
        linewidth=1.8,
        linestyle="dashed",
        label="Gaussian of the same moments",
    )
    axes[0].set_title(f"density of y at x = {masks.AT:g}".replace("-", "\N{MINUS SIGN}"), fontsize=11)
    axes[0].set(xlabel="y", ylim=(0, 1.4 * float(result.log_density.exp().max())))
    axes[0].legend(frameon=False, fontsize=9, loc="upper left")
    sizes = [estimate.draws for estimate in result.estimates]
    axes[1].loglog(sizes, [estimate.mean_error for estimate in result.estimates], "o", color=BLUE, label="found")
    axes[1].loglog(
        sizes,
        [estimate.mean_error_by_theory for estimate in result.estimates],
        color=GREY,
        label="standard deviation / √draws",
    )
    axes[1].set_title("error of the mean", fontsize=11)
    axes[1].legend(frameon=False, fontsize=9)
    for values, colour, marker, label in (
        (
            [estimate.unbiased_variance for estimate in result.estimates],
            GREEN,
            "o",
            "scatter / (draws \N{MINUS SIGN} 1)",
        ),
        ([estimate.plug_in_variance for estimate in result.estimates], ORANGE, "s", "scatter / draws"),
    ):
        axes[2].semilogx(sizes, [value / result.variance for value in values], marker, color=colour, label=label)
    errors = [5 * estimate.standard_error / result.variance for estimate in result.estimates]
    axes[2].fill_between(
        sizes, [1 - e for e in errors], [1 + e for e in errors], color=GREY, alpha=0.25, label="± 5 standard errors"
    )
    axes[2].semilogx(
        sizes, [1 - 1 / size for size in sizes], color=ORANGE, linewidth=1.2, label="1 \N{MINUS SIGN} 1 / draws"
    )
    axes[2].set_title("mean of the variances over the exact one", fontsize=11)
    axes[2].legend(frameon=False, fontsize=9, loc="lower right")
    for panel in axes[1:]:
        panel.set_xlabel("draws")
        panel.set_xticks(sizes[::2], [str(size) for size in sizes[::2]])
        panel.minorticks_off()
    low, high = axes[1].get_ylim()
    ticks = [tick for tick in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0) if low < tick < high]
    axes[1].set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    for panel in axes:
        plain(panel)
    save(figure, path)


def _divergence(study: Study, path: Path) -> None:
    result = study.divergence
    figure, axes = panels(1, 2, size=(5.2, 4.0))
    distance = array(result.distance)
    for colour, (width, exact) in zip(COLOURS, result.exact.items(), strict=True):
        far = result.far[width]
        axes[0].plot(distance, array(exact - far[0]), color=colour, linewidth=1.8, label=f"s l = {width:g}")
        axes[0].plot(distance, array(far - far[0]), color=colour, linewidth=1.4, linestyle="dashed")
        slope, taken = (torch.gradient(values, spacing=(result.distance,))[0] for values in (exact, far))
        axes[1].plot(distance[1:], array((slope / taken)[1:]), color=colour, linewidth=1.8)
        failure = next(failure for failure in result.failures if failure.width == width and failure.rate == 0.5)
        axes[1].plot([failure.distance], [0.0], "o", color=colour, markersize=5, clip_on=False)
    axes[0].set_title("KL in nats, from what training has at m = 0", fontsize=11)
    axes[0].plot([], [], color=GREY, linewidth=1.4, linestyle="dashed", label="taken for it in training")
    axes[1].set_title("slope of the exact KL over that of training", fontsize=11)
    axes[1].axhline(1.0, color=GREY, linewidth=0.9, linestyle="dashed")
    axes[1].axhline(0.0, color=BLACK, linewidth=0.9)
    axes[1].set_ylim(-2, 1.3)
    axes[1].annotate("below: wrong in sign", (0.4, -0.2), fontsize=9, color=BLACK)
    for panel in axes:
        panel.set(xlabel="|m| / s", xlim=(0, float(result.distance[-1])))
        plain(panel)
    axes[0].legend(frameon=False, fontsize=9, title="exact, p = 0.5", loc="upper center")
    save(figure, path)


def _training(study: Study, path: Path) -> None:
    figure, axes = panels(1, 2, size=(4.6, 3.5), sharex=True, sharey=True)
    highest = max(float(own.held_out.max()) for own in study.training.values())
    for panel, kind, title in zip(axes, ("train", "held_out"), ("training rows", "held-out rows"), strict=True):
        for colour, (name, own) in zip((BLACK, BLUE), study.training.items(), strict=True):
            mean, error, steps = getattr(own, kind), getattr(own, f"{kind}_error"), array(own.steps)
            panel.plot(steps, array(mean), color=colour, linewidth=1.8, label=name)
            low, high = array(mean - error), array(mean + error)
            panel.fill_between(steps, low, high, color=colour, alpha=0.18, linewidth=0)
        panel.set(xlabel="step", xlim=(0, training.STEPS), ylim=(0, 1.1 * highest))
        panel.set_title(f"Loss on {title}", fontsize=11)
        panel.grid(axis="y", alpha=0.3)
        plain(panel)
    axes[0].set_ylabel("NLL with dropout off, nats per row")
    axes[0].legend(frameon=False, fontsize=9, loc="upper left")
    figure.suptitle(
        f"Two moons, {training.ROWS} rows, rate {training.RATE:g}: mean and standard error over "
        f"{training.DATA_SETS} data sets",
        fontsize=10,
    )
    save(figure, path)
