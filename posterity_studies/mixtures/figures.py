"""All figures of the study."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from posterity.evidence import jensen
from posterity.numerics.random import Key
from posterity.report.canvas import BLACK, BLUE, GREEN, GREY, ORANGE, RED, array, panels, plain, save
from posterity_studies.frame import draw_all
from posterity_studies.mixtures import bounds, prior
from posterity_studies.mixtures import clusters as five
from posterity_studies.mixtures.bounds import Curve, Jensen
from posterity_studies.mixtures.clusters import Clusters
from posterity_studies.mixtures.example import UNKNOWN, Sample, Values, log_joint
from posterity_studies.mixtures.prior import Priors
from posterity_studies.mixtures.study import Study

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CLASSES = (RED, BLUE)
SHOWN = (0, 1, 3)  # rounds with responsibilities, before the last
CURVES = (BLUE, GREEN, RED)
STEPS = 12  # rounds of the staircase
GRID = 400
RUG = -0.025  # height at which points are drawn, below densities


def points(study: Study, path: Path) -> None:
    """Draw the points with their classes and densities; and unlabelled, with the mixture before and after EM."""
    grid = _grid(study.data)
    figure, (left, right) = panels(1, 2, size=(4.8, 3.3), sharex=True, sharey=True)
    densities = _weighted(grid, study.complete)
    for component, (colour, name) in enumerate(zip(CLASSES, ("z = 1", "z = 0"), strict=True)):
        left.plot(array(grid), array(densities[:, component]), color=colour, linewidth=1.8, label=f"p(y, {name})")
        _rug(left, study.data.points[study.data.labels == component], colour)
    left.set_title("With labels: class statistics", fontsize=11)
    highest = 0.0
    for colour, style, name, at in (
        (GREY, "dashed", "at the start", study.run.history[0]),
        (GREEN, "solid", f"after {len(study.run.after_e)} rounds of EM", study.run.end),
        (BLACK, "dotted", "with labels", study.complete),
    ):
        density = _weighted(grid, at).sum(-1)
        highest = max(highest, float(density.max()))
        right.plot(array(grid), array(density), color=colour, linestyle=style, linewidth=1.8, label=name)
    _rug(right, study.data.points, BLACK)
    right.set_title("Without labels: the mixture p(y)", fontsize=11)
    for panel in (left, right):
        panel.set(xlabel="y", ylim=(2 * RUG, 1.35 * highest))  # room for the legend
        panel.set_yticks([tick for tick in panel.get_yticks() if 0 <= tick <= 1.1 * highest])
        panel.legend(frameon=False, fontsize=9, loc="upper left")
        plain(panel)
    left.set_ylabel("density")
    save(figure, path)


def responsibilities(study: Study, path: Path) -> None:
    """Draw p(z = 1 | y), with the points in its colours, at the start, after some rounds and at the end."""
    last = len(study.run.history) - 1
    rounds = [*(number for number in SHOWN if number < last), last]
    grid, height = _grid(study.data), Key(0).uniform((len(study.data.points),), torch.float64, "cpu")
    figure, axes = panels(1, len(rounds), size=(3.0, 2.9), sharex=True, sharey=True)
    for panel, number in zip(axes, rounds, strict=True):
        at = study.run.history[number]
        curve = _responsibility(grid, at)
        panel.plot(array(grid), array(curve), color=BLACK, linewidth=1.4)
        panel.scatter(
            array(study.data.points),
            array(-0.3 + 0.2 * height),
            c=array(_responsibility(study.data.points, at)),
            cmap="coolwarm",
            vmin=0,
            vmax=1,
            s=11,
            linewidths=0.3,
            edgecolors=BLACK,
        )
        for mean, colour in zip(at["means"].tolist(), CLASSES, strict=True):
            panel.plot([mean, mean], [-0.05, 1.0], color=colour, linestyle="dotted", linewidth=1.2)
        title = "start" if number == 0 else f"after {number} round{'s' if number > 1 else ''}"
        panel.set_title(title + (" (end)" if number == last else ""), fontsize=10)
        panel.set(xlabel="y", ylim=(-0.36, 1.04), yticks=(0, 0.5, 1))
        plain(panel)
    axes[0].set_ylabel("p(z = 1 | y)")
    bar = figure.colorbar(axes[0].collections[0], ax=axes, pad=0.02)
    bar.set_label("responsibility of component 1", fontsize=9)
    bar.ax.tick_params(labelsize=9)
    save(figure, path)


def bound(study: Study, path: Path) -> None:
    """Draw the log-likelihood over one mean with the bounds that touch it: for EM in that mean only, and for EM."""
    figure, axes = panels(2, 2, size=(4.7, 3.2))
    _touching(axes[0], study.one_mean, CURVES)
    axes[0].set_title(r"EM in $\mu_1$ alone: one log-likelihood, three bounds", fontsize=10)
    for number, (panel, curve) in enumerate(zip(axes[1:], study.curves, strict=True), 1):
        _touching(panel, [curve], (CURVES[number - 1],))
        panel.set_title(f"EM, round {number}: all else as it is then", fontsize=10)
    for panel in axes[2:]:
        panel.set_xlabel(r"$\mu_1$")
    for panel in axes[::2]:
        panel.set_ylabel("nats")
    save(figure, path, legend_of=axes[0], ncols=4, fontsize=9)


def _touching(panel: "Axes", curves: Sequence[Curve], colours: Sequence[str]) -> None:
    first = curves[0]
    panel.plot(array(first.grid), array(first.log_likelihood), color=BLACK, linewidth=2, label="log-likelihood")
    for curve, colour in zip(curves, colours, strict=True):
        name = "bound F(q, $\\mu_1$)" if curve is first else None
        panel.plot(array(curve.grid), array(curve.bound), color=colour, linewidth=1.4, label=name)
        touch = "touches (E-step)" if curve is first else None
        panel.plot(curve.at, curve.value, "o", color=colour, markersize=7, zorder=3, label=touch)
        nearest = int((curve.grid - curve.best).abs().argmin())
        top = "its maximum (M-step)" if curve is first else None
        panel.plot(curve.best, float(curve.bound[nearest]), "^", color=colour, markersize=7, zorder=3, label=top)
    plain(panel)


def staircase(study: Study, path: Path) -> None:
    """The bound after each E- and M-step from the second round on, and the log-likelihood's distance from its limit."""
    figure, (left, right) = panels(1, 2, size=(4.7, 3.2))
    touching, raised = study.run.after_e.tolist(), study.run.after_m.tolist()
    rounds = range(1, min(STEPS, len(touching) - 1))
    for number in rounds:
        names = ("M-step: $\\theta$ moves", "E-step: q = p(z | y)") if number == rounds[0] else (None, None)
        left.plot([number, number + 1], [touching[number], raised[number]], color=BLUE, linewidth=1.6, label=names[0])
        left.plot([number + 1] * 2, [raised[number], touching[number + 1]], color=RED, linewidth=2.4, label=names[1])
    left.plot(rounds, [touching[number] for number in rounds], "o", color=BLACK, markersize=4, label="log-likelihood")
    left.set(xlabel="round", ylabel="bound, nats")
    left.legend(frameon=False, fontsize=9, loc="lower right")
    gap = study.run.after_e[-1] - study.run.after_e[:-1]
    right.semilogy(array(gap), color=BLACK, linewidth=1.6)
    right.set(xlabel="round", ylabel="log-likelihood, nats below its limit")
    right.grid(axis="y", alpha=0.3)
    for panel in (left, right):
        plain(panel)
    save(figure, path)


def inequality(study: Study, path: Path) -> None:
    """Draw Jensen's inequality for one point: the log of a mean above the mean of logs, and the gap as a KL over q."""
    figure, (left, right) = panels(1, 2, size=(4.8, 3.6))
    result, chosen = study.jensen, bounds.CHOSEN
    ratios, mean = result.ratios.tolist(), float(result.joint.sum())
    low, high = 0.6 * min(ratios), 1.12 * max(ratios)
    grid = torch.linspace(low, high, GRID, dtype=torch.float64, device="cpu")
    left.plot(array(grid), array(grid.log()), color=BLACK, linewidth=1.8, label="log r")
    left.plot(ratios, [math.log(ratio) for ratio in ratios], "o-", color=BLUE, markersize=6, linewidth=1.4)
    for ratio, weight, name in zip(ratios, (chosen, 1.0 - chosen), ("1", "0"), strict=True):
        text = f"p(y, z = {name}) / q,\nq(z = {name}) = {weight:.1f}"
        left.annotate(text, (ratio, math.log(ratio)), (14, -18), textcoords="offset points", fontsize=9, color=BLUE)
    _gap(left, mean, result, "log E r", "E log r")
    left.set(xlabel="r", ylabel="nats", xlim=(low - 0.02, high + 0.08))
    left.set_title("A concave function: its chord lies below", fontsize=11)
    right.plot(array(result.q), array(result.bound), color=BLUE, linewidth=1.8)
    right.axhline(result.log_mean, color=BLACK, linewidth=1.4)
    right.plot(result.responsibility, result.log_mean, "o", color=RED, markersize=7, zorder=3)
    right.annotate(
        "touches at\nq = p(z = 1 | y)", (result.responsibility, result.log_mean), (0, -32),
        textcoords="offset points", fontsize=9, color=RED, ha="center",
    )  # fmt: skip
    right.annotate("log p(y)", (0.0, result.log_mean), (2, 5), textcoords="offset points", fontsize=9)
    _gap(right, chosen, result, "", "")
    right.annotate(
        "KL(q ‖\np(z | y))", (chosen, result.log_mean), (8, -32),
        textcoords="offset points", fontsize=9, color=GREEN,
    )  # fmt: skip
    right.set(xlabel="q(z = 1)", ylabel="bound F(q), nats", ylim=(None, result.log_mean + 0.15))
    right.set_title(f"The bound at y = {bounds.POINT:g}, by q", fontsize=11)
    for panel in (left, right):
        plain(panel)
    save(figure, path)


def _gap(panel: "Axes", where: float, result: Jensen, upper: str, lower: str) -> None:
    """Draw the gap of the inequality as an arrow between two points."""
    ends = (result.mean_log, result.log_mean)
    panel.annotate("", (where, ends[1]), (where, ends[0]), arrowprops={"arrowstyle": "<->", "color": GREEN, "lw": 1.6})
    for height, text, shift in zip(ends, (lower, upper), ((6, -9), (-6, 6)), strict=True):
        side = "left" if shift[0] > 0 else "right"
        panel.plot(where, height, "s", color=GREEN, markersize=5, zorder=3)
        panel.annotate(text, (where, height), shift, textcoords="offset points", fontsize=10, color=GREEN, ha=side)


def factorised(study: Study, path: Path) -> None:
    """Draw EM, whose bound touches, and variational EM with a factorised q, whose bound stays below by a KL."""
    figure, (left, right) = panels(1, 2, size=(4.8, 3.5))
    for (name, ascent), colour, other in zip(study.ascents.items(), (BLACK, BLUE), (ORANGE, BLUE), strict=True):
        left.plot(array(ascent.log_likelihood), color=colour, linewidth=2.0, label=f"{name}: log-likelihood")
        left.plot(array(ascent.bound), color=other, linewidth=1.6, linestyle="dashed", label=f"{name}: bound")
        right.plot(array(ascent.divergence), color=colour, linewidth=1.8, label=name)
    product = study.ascents["variational EM"]
    low, value = array(product.bound), array(product.log_likelihood)
    left.fill_between(range(len(low)), low, value, color=BLUE, alpha=0.18, linewidth=0, label="KL(q ‖ p(z | y))")
    left.set(xlabel="round", ylabel="nats", ylim=(float(low[1]) - 4.0, None))
    left.legend(frameon=False, fontsize=9, loc="lower right")
    right.set(xlabel="round", ylabel="KL(q ‖ p(z | y)), nats", ylim=(-0.3, None))
    right.set_title("What a factorised q leaves out", fontsize=11)
    left.set_title("Two hidden coins that explain one point", fontsize=11)
    right.legend(frameon=False, fontsize=9)
    for panel in (left, right):
        plain(panel)
    save(figure, path)


def _grid(data: Sample) -> Tensor:
    low, high = float(data.points.min()) - 0.8, float(data.points.max()) + 0.8
    return torch.linspace(low, high, GRID, dtype=torch.float64, device="cpu")


def _table(where: Tensor, at: Values) -> Tensor:
    return log_joint(Sample(where, torch.full_like(where, UNKNOWN, dtype=torch.int64)), at)


def _weighted(where: Tensor, at: Values) -> Tensor:
    """Return p(y, z) at y (G,), (G, 2)."""
    return _table(where, at).exp()


def _responsibility(where: Tensor, at: Values) -> Tensor:
    """p(z = 1 | y), (G,)."""
    return jensen.posterior(_table(where, at))[:, 0]


def _rug(panel: "Axes", values: Tensor, colour: str) -> None:
    panel.plot(array(values), [RUG] * len(values), "|", color=colour, markersize=9, alpha=0.6, markeredgewidth=0.9)


BINS = 20
ABOVE = 0.09  # nats above the lowest NLL that the enlarged panel shows


def labels(study: Study, path: Path) -> None:
    """Draw the error of the means against the share of labels."""
    figure, (panel,) = panels(1, 1, size=(5.0, 3.2))
    rows = study.shares
    panel.errorbar(
        range(len(rows)),
        [row.error for row in rows],
        yerr=[2 * row.standard_error for row in rows],
        fmt="o-",
        color=BLUE,
        capsize=3,
        linewidth=1.4,
    )
    panel.set_xticks(range(len(rows)), [f"{100 * row.share:g} %" for row in rows])
    panel.set(xlabel="share of points with a label", ylabel="error of the means", ylim=(0, None))
    panel.set_title("Error ± 2 standard errors over data sets", fontsize=10)
    panel.grid(axis="y", alpha=0.3)
    plain(panel)
    save(figure, path)


def clusters(study: Study, path: Path) -> None:
    """Draw the rows with the components that stay alive, the ends of the starts, and the number of components."""
    figure, (rows, ends, counts) = panels(1, 3, size=(4.1, 3.5))
    _ellipses(rows, study.clusters)
    below = {start.kind: [study.clusters.best - end for end in start.ends] for start in study.clusters.starts}
    width = max(1.0, *(max(values) for values in below.values())) / BINS  # nats: least range of the ends
    for shift, (kind, values), colour in zip((0.0, 0.5), below.items(), (ORANGE, BLUE), strict=True):
        heights = torch.tensor(values).div(width).floor().clamp(max=BINS - 1).long().bincount(minlength=BINS)
        where = [(index + shift) * width for index in range(BINS)]
        ends.bar(where, heights.tolist(), 0.5 * width, align="edge", color=colour, label=kind)
    ends.set(xlabel="nats below the best", ylabel=f"of {five.STARTS} starts")
    ends.set_title(f"Where EM ends, K = {len(five.CENTRES)}", fontsize=10)
    ends.legend(frameon=False, fontsize=9, title="start", title_fontsize=9)
    numbers = [row.components for row in study.clusters.components]
    bounds = [row.elbo for row in study.clusters.components]
    criteria = [-0.5 * row.bic for row in study.clusters.components]
    counts.plot(numbers, criteria, "s-", color=ORANGE, markersize=5, label="$-$BIC / 2, by EM")
    counts.plot(numbers, bounds, "o-", color=BLUE, markersize=5, label="ELBO, Bayesian")
    for component in study.clusters.components:
        counts.annotate(
            str(component.alive),
            (component.components, component.elbo),
            xytext=(0, -14),
            textcoords="offset points",
            ha="center",
            fontsize=9,
            color=BLUE,
        )
    low, high = min(*criteria, *bounds), max(*criteria, *bounds)
    counts.set(xlabel="components K", ylabel="nats", ylim=(low - 0.12 * (high - low), high + 0.06 * (high - low)))
    counts.set_xticks(numbers)
    counts.set_title("How many? Blue numbers: those alive", fontsize=10)
    counts.legend(frameon=False, fontsize=9, loc="lower right")
    for panel in (ends, counts):
        plain(panel)
    save(figure, path)


def _ellipses(panel: "Axes", result: Clusters) -> None:
    """Draw the rows, and each component as its contours at one and two standard deviations."""
    panel.scatter(array(result.rows[:, 0]), array(result.rows[:, 1]), s=5, color=GREY, linewidths=0)
    angle = torch.linspace(0.0, 6.2832, 100, dtype=torch.float64, device="cpu")
    circle = torch.stack([angle.cos(), angle.sin()], 1)
    for mean, covariance in zip(result.means, result.covariances, strict=True):
        factor = torch.linalg.cholesky(covariance)
        for radius in (1.0, 2.0):
            line = mean + radius * circle @ factor.T
            panel.plot(array(line[:, 0]), array(line[:, 1]), color=RED, linewidth=1.3)
    panel.set(xlabel="$x_1$", ylabel="$x_2$")
    panel.set_title(f"{five.MOST} components offered, {len(result.means)} alive", fontsize=10)
    panel.set_aspect("equal", "datalim")


def priors(study: Study, path: Path) -> None:
    """Draw test NLL over fixed prior scales, and the choices of variational EM; the right panel is enlarged."""
    figure, axes = panels(1, 2, size=(4.8, 3.4))
    for panel in axes:
        _scales(panel, study.priors)
        panel.set(xlabel="scale of the prior")
    axes[0].set_ylabel("test NLL, nats a row")
    axes[1].set_ylim(prior.noise_alone() - 0.02, min(nll.mean for nll in study.priors.fixed) + ABOVE)
    axes[1].set_title("The same, enlarged", fontsize=10)
    axes[0].set_title(f"{prior.ROWS} rows, network 1-{prior.HIDDEN}-1, Laplace posterior", fontsize=10)
    save(figure, path, legend_of=axes[0], ncols=2, fontsize=9)


def _scales(panel: "Axes", result: Priors) -> None:
    means, errors = [nll.mean for nll in result.fixed], [nll.error for nll in result.fixed]
    panel.errorbar(
        prior.SCALES,
        means,
        yerr=errors,
        fmt="o-",
        color=BLACK,
        markersize=4,
        capsize=2,
        linewidth=1.2,
        label="fixed, ± standard error",
    )
    shared, layers = result.chosen
    panel.errorbar(
        shared.scales[0],
        shared.test_nll.mean,
        yerr=shared.test_nll.error,
        fmt="*",
        color=RED,
        markersize=13,
        capsize=3,
        zorder=3,
        label="variational EM: one scale, noise known",
    )
    panel.axhline(
        layers.test_nll.mean,
        color=GREEN,
        linestyle="dashed",
        linewidth=1.4,
        label="variational EM: a scale for each layer, noise found",
    )
    panel.axhline(prior.noise_alone(), color=GREY, linestyle="dotted", linewidth=1.4, label="sine and noise known")
    panel.set_xscale("log")
    panel.grid(axis="y", alpha=0.3)
    plain(panel)


def draw(study: Study, folder: Path) -> list[str]:
    """Draw the figures of the study into the folder; return the names of the files."""
    figures = {
        "points.png": points,
        "responsibilities.png": responsibilities,
        "jensen.png": inequality,
        "bound.png": bound,
        "staircase.png": staircase,
        "factorised.png": factorised,
        "labels.png": labels,
        "clusters.png": clusters,
        "priors.png": priors,
    }
    return draw_all(figures, study, folder)
