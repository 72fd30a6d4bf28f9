"""The figures of the study."""

import math
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from posterity.report.canvas import BLACK, BLUE, GREEN, GREY, ORANGE, PINK, RED, SKY, array, gentle, panels, plain, save
from posterity.report.figures import class_margins
from posterity_studies.frame import draw_all
from posterity_studies.logistic.chain_figures import draw_bias, draw_errors, draw_paths, draw_samples
from posterity_studies.logistic.exact import log_density
from posterity_studies.logistic.study import Study, probit_difference

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LINES = {
    "MAP": (BLACK, "solid", 1.6),
    "Laplace, Monte Carlo": (PINK, "solid", 3.6),  # wide and below: the integral that it estimates is drawn over it
    "Laplace, exact integral": (BLUE, "solid", 1.6),
    "Laplace, probit Φ": (SKY, "dotted", 2.6),
    "Laplace, probit κ": (ORANGE, "solid", 1.6),
    "Variational, factorised": (RED, "dashed", 1.6),
    "Variational, full": (GREY, "dashdot", 1.6),
    "Expectation propagation": (BLACK, "dotted", 1.8),
    "Exact posterior": (GREEN, "solid", 2.0),
}
TWO = (("label 0", "#053061", "o"), ("label 1", "#67001f", "^"))  # the dark ends of the map's own colours
THREE = (BLUE, "o"), (RED, "^"), (GREEN, "s")

FINE = 161  # points along each side of a refined map


def draw(study: Study, folder: Path) -> list[str]:
    """Draw the figures of the study into the folder; return the names of the files."""
    figures = {
        "maps.png": _maps,
        "rays.png": _rays,
        "laplace.png": _laplace,
        "probit.png": _probit,
        "evidence.png": _evidence,
        "multiclass.png": _multiclass,
        "samples.png": draw_samples,
        "errors.png": draw_errors,
        "paths.png": draw_paths,
        "langevin.png": draw_bias,
    }
    return draw_all(figures, study, folder)


def _maps(study: Study, path: Path) -> None:
    figure, axes = panels(3, 3, size=(3.3, 3.25), sharex=True, sharey=True)
    side, reach = len(study.axis), float(study.axis[-1])
    extent = (-reach, reach, -reach, reach)
    colours = gentle("RdBu_r", 0.15, 0.85)
    for panel, (name, values) in zip(axes, study.maps.items(), strict=True):
        shown = array(values.reshape(side, side).T)  # rows are the second input
        panel.imshow(shown, origin="lower", extent=extent, cmap=colours, vmin=0, vmax=1, interpolation="bilinear")
        axis = array(study.axis)
        panel.contour(axis, axis, shown, levels=[0.1, 0.9], colors=BLACK, linestyles="dotted", linewidths=0.9)
        panel.contour(axis, axis, shown, levels=[0.5], colors=BLACK, linewidths=1.4)
        for index, (label, colour, marker) in enumerate(TWO):
            rows = study.regression.inputs[study.regression.targets == index]
            _points(panel, rows, colour, marker, label)
        panel.set_title(name, fontsize=11)
        panel.set_aspect("equal")
    for panel in axes[6:]:
        panel.set_xlabel("$x_1$")
    for panel in axes[::3]:
        panel.set_ylabel("$x_2$")
    bar = figure.colorbar(axes[0].images[0], ax=axes, shrink=0.75, pad=0.02)
    bar.set_label("p(y = 1 | x);  lines at 0.1, 0.5, 0.9", fontsize=10)
    save(figure, path, legend_of=axes[0], ncols=2)


def _rays(study: Study, path: Path) -> None:
    figure, axes = panels(1, 3, size=(4.2, 4.2), sharex=True)
    for panel, ray in zip(axes, study.rays, strict=True):
        for name, values in ray.probability.items():
            colour, style, width = LINES[name]
            panel.semilogx(
                array(ray.distance), array(values), color=colour, linestyle=style, linewidth=width, label=name
            )
        for name in ("Laplace, exact integral", "Laplace, probit κ", "Exact posterior"):
            panel.axhline(ray.limit[name], color=LINES[name][0], linestyle="dashed", linewidth=1.0, zorder=1)
        direction = f"({ray.direction[0]:g}, {ray.direction[1]:g})".replace("-", "\N{MINUS SIGN}")
        panel.set_title(f"along x = c · {direction}", fontsize=11)
        uncertain = torch.cat([values for name, values in ray.probability.items() if name != "MAP"])
        low, high = float(uncertain.min()), float(uncertain.max())
        margin = 0.06 * (high - low)  # the curve of MAP saturates and may leave the panel
        panel.set(xlabel="c", ylim=(low - margin, high + margin), xlim=(0.1, 1000))
        plain(panel)
    axes[0].set_ylabel("p(y = 1 | x)")
    axes[1].plot([], [], color=GREY, linestyle="dashed", linewidth=1.0, label="limit by theory")
    save(figure, path, legend_of=axes[1], ncols=4)


def _laplace(study: Study, path: Path) -> None:
    figure, axes = panels(1, 3, size=(4.2, 3.9))
    curve = study.curve
    u = torch.linspace(-0.6, 2.8, 400, dtype=torch.float64)
    for panel, values in ((axes[0], torch.exp), (axes[1], torch.Tensor.clone)):
        panel.plot(array(u), array(values(curve.log_density(u))), color=BLUE, linewidth=2.0, label="density")
        panel.plot(
            array(u),
            array(values(curve.laplace_log_density(u))),
            color=RED,
            linewidth=2.0,
            linestyle="dashed",
            label="Laplace",
        )
        panel.axvline(curve.mode, color=GREY, linewidth=0.9, linestyle="dotted", zorder=0)
        panel.set(xlabel="u", xlim=(-0.6, 2.8))
        plain(panel)
    axes[0].set_title(r"$\exp(7u - 2e^u)$, normalised", fontsize=11)
    axes[0].set_ylim(0, 1.2)
    axes[1].set_title("the same, logarithm", fontsize=11)
    axes[1].set_ylim(-10, 1)
    axes[0].legend(frameon=False, fontsize=10, loc="upper left")
    _weights(study, axes[2])
    save(figure, path)


def _weights(study: Study, panel: "Axes") -> None:
    """Exact posterior of the two weights and its Laplace approximation, by contours at equal shares of the peak."""
    first = torch.linspace(-1.8, 5.6, 141, dtype=torch.float64)
    second = torch.linspace(-2.2, 6.2, 141, dtype=torch.float64)
    grid = torch.cartesian_prod(first, second)
    exact = log_density(study.regression, grid)
    centred = grid - study.regression.laplace.point()
    laplace = -0.5 * (centred @ torch.linalg.inv(study.regression.covariance) * centred).sum(1)
    for values, colour, style in ((exact, BLUE, "solid"), (laplace, RED, "dashed")):
        shown = array((values - values.max()).exp().reshape(141, 141).T)
        panel.contour(
            array(first),
            array(second),
            shown,
            levels=[0.02, 0.1, 0.3, 0.6, 0.9],
            colors=colour,
            linestyles=style,
            linewidths=1.3,
        )
    _points(panel, study.exact.mean[None], BLUE, "D", "exact mean")
    _points(panel, study.regression.mode.theta[None], RED, "s", "mode")
    panel.set(xlabel="$w_1$", ylabel="$w_2$")
    panel.set_title("weights: exact posterior (solid), Laplace (dashed)", fontsize=11)
    panel.legend(frameon=False, fontsize=10, loc="upper right")
    plain(panel)


def _probit(study: Study, path: Path) -> None:
    figure, axes = panels(1, 2, size=(4.6, 3.6))
    a = torch.linspace(-6, 6, 481, dtype=torch.float64)
    sigmoid = torch.sigmoid(a)
    axes[0].plot(array(a), array(sigmoid), color=BLUE, linewidth=2.0, label="sigmoid(a)")
    probit = array(sigmoid + probit_difference(a))
    axes[0].plot(array(a), probit, color=ORANGE, linewidth=2.0, linestyle="dashed", label=r"$\Phi(a\sqrt{\pi/8})$")
    axes[0].legend(frameon=False, fontsize=10, loc="upper left")
    axes[0].set_title("sigmoid and probit", fontsize=11)
    axes[1].plot(array(a), array(probit_difference(a)), color=ORANGE, linewidth=2.0)
    axes[1].axhline(0, color=GREY, linewidth=0.8, zorder=0)
    at, largest = study.probit.at, study.probit.largest
    for sign in (-1, 1):
        axes[1].plot([sign * at], [sign * largest], marker="o", color=BLACK, markersize=5)
    axes[1].annotate(
        f"{largest:.4f} at a = {at:.2f}", (at, largest), (-8, 0), textcoords="offset points", ha="right", fontsize=10
    )
    axes[1].set_title("probit \N{MINUS SIGN} sigmoid", fontsize=11)
    for panel in axes:
        panel.set(xlabel="a", xlim=(-6, 6))
        plain(panel)
    save(figure, path)


def _evidence(study: Study, path: Path) -> None:
    """Draw the KL as bars from the log evidence down to the ELBO."""
    figure, (panel,) = panels(1, 1, size=(10.4, 4.2))
    evidence = study.exact.log_evidence
    for index, parts in enumerate(study.decompositions):
        label = index == 0  # one entry in the legend
        name = "KL(q ‖ posterior)" if label else None
        panel.bar(index, -parts.divergence, 0.6, evidence, color=ORANGE, label=name)
        panel.plot(
            [index - 0.36, index + 0.36],
            2 * [parts.elbo],
            color=BLUE,
            linewidth=2.2,
            label="ELBO(q)" if label else None,
        )
        text = f"ELBO {parts.elbo:.3f}\nKL {parts.divergence:.3f}".replace("-", "\N{MINUS SIGN}")
        panel.text(index, parts.elbo - 0.06, text, ha="center", va="top", fontsize=9, color=BLACK)
    panel.axhline(
        evidence, color=BLACK, linestyle="dashed", linewidth=1.3, label=f"log p(y) = \N{MINUS SIGN}{-evidence:.4f}"
    )
    panel.set_xticks(range(len(study.decompositions)), [parts.name for parts in study.decompositions], fontsize=10)
    lowest = min(parts.elbo for parts in study.decompositions)
    panel.set(ylim=(lowest - 0.5, evidence + 0.3), ylabel="nats")
    panel.set_title("log p(y) = ELBO(q) + KL(q ‖ posterior) for Gaussians q", fontsize=11)
    panel.legend(frameon=False, fontsize=10, loc="lower right")
    plain(panel)
    save(figure, path)


def _multiclass(study: Study, path: Path) -> None:
    result = study.multiclass
    figure, axes = panels(1, 4, size=(3.5, 4.0), sharex=True, sharey=True)
    reach = float(result.axis[-1])
    axis = array(torch.linspace(-reach, reach, FINE))
    colours = gentle("Purples_r", 0.25, 1.0)
    for panel, (name, probs) in zip(axes, result.probs.items(), strict=True):
        fine = _finer(probs)
        shown = array(fine.amax(1).reshape(FINE, FINE).T)
        panel.imshow(
            shown,
            origin="lower",
            extent=(-reach, reach, -reach, reach),
            cmap=colours,
            vmin=1 / 3,
            vmax=1,
            interpolation="bilinear",
        )
        for margin in class_margins(fine):
            if margin.min() < 0 < margin.max():
                panel.contour(
                    axis, axis, array(margin.reshape(FINE, FINE).T), levels=[0.0], colors=BLACK, linewidths=1.2
                )
        if shown.max() > 0.9:
            panel.contour(axis, axis, shown, levels=[0.9], colors=BLACK, linestyles="dotted", linewidths=0.9)
        for index, (colour, marker) in enumerate(THREE):
            rows = result.regression.inputs[result.regression.targets == index][:, :2]
            _points(panel, rows, colour, marker, f"class {index}")
        panel.set_title(name, fontsize=11)
        panel.set(xlabel="$x_1$", aspect="equal", xticks=[-8, -4, 0, 4, 8], yticks=[-8, -4, 0, 4, 8])
    axes[0].set_ylabel("$x_2$")
    bar = figure.colorbar(axes[0].images[0], ax=axes, shrink=0.7, pad=0.015)
    bar.set_label("largest probability;  dotted at 0.9", fontsize=10)
    save(figure, path, legend_of=axes[0], ncols=3)


def _points(panel: "Axes", rows: Tensor, colour: str, marker: str, label: str) -> None:
    first, second = array(rows).T
    panel.scatter(
        first, second, s=30, marker=marker, color=colour, edgecolor="white", linewidth=0.6, zorder=3, label=label
    )


def _finer(probs: Tensor) -> Tensor:
    """Interpolate class probabilities (side^2, C) of a map to (FINE^2, C), so that borders are smooth.

    Their logarithms are interpolated: in a linear model their differences, and so the borders at the mode, are linear.
    """
    side = math.isqrt(len(probs))
    planes = probs.clamp_min(1e-9).log().T.reshape(1, -1, side, side)
    finer = torch.nn.functional.interpolate(planes, size=(FINE, FINE), mode="bilinear", align_corners=True)
    return finer.reshape(-1, FINE * FINE).T.softmax(1)
