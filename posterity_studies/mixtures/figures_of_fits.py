"""Figures of whole fits: clusters in the plane, what labels are worth, and priors of a network."""

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from posterity.report.canvas import BLACK, BLUE, GREEN, GREY, ORANGE, RED, array, panels, plain, save
from posterity_studies.mixtures import clusters as five
from posterity_studies.mixtures import prior
from posterity_studies.mixtures.clusters import Clusters
from posterity_studies.mixtures.prior import Priors
from posterity_studies.mixtures.study import Study

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BINS = 20
ABOVE = 0.09  # nats above the lowest NLL that the enlarged panel shows


def labels(study: Study, path: Path) -> None:
    """The error of the means against the share of labels."""
    figure, (place,) = panels(1, 1, size=(5.0, 3.2))
    rows = study.shares
    place.errorbar(
        range(len(rows)),
        [row.error for row in rows],
        yerr=[2 * row.standard_error for row in rows],
        fmt="o-",
        color=BLUE,
        capsize=3,
        linewidth=1.4,
    )
    place.set_xticks(range(len(rows)), [f"{100 * row.share:g} %" for row in rows])
    place.set(xlabel="share of points with a label", ylabel="error of the means", ylim=(0, None))
    place.set_title("Error ± 2 standard errors over data sets", fontsize=10)
    place.grid(axis="y", alpha=0.3)
    plain(place)
    save(figure, path)


def clusters(study: Study, path: Path) -> None:
    """The rows with the components that stay alive, where starts end, and how many components there should be."""
    figure, (rows, ends, counts) = panels(1, 3, size=(4.1, 3.5))
    _ellipses(rows, study.clusters)
    below = {one.kind: [study.clusters.best - end for end in one.ends] for one in study.clusters.starts}
    width = max(1.0, *(max(values) for values in below.values())) / BINS  # nats, also where all ends are the same
    for shift, (kind, values), colour in zip((0.0, 0.5), below.items(), (ORANGE, BLUE), strict=True):
        heights = torch.tensor(values).div(width).floor().clamp(max=BINS - 1).long().bincount(minlength=BINS)
        where = [(place + shift) * width for place in range(BINS)]
        ends.bar(where, heights.tolist(), 0.5 * width, align="edge", color=colour, label=kind)
    ends.set(xlabel="nats below the best", ylabel=f"of {five.STARTS} starts")
    ends.set_title(f"Where EM ends, K = {len(five.CENTRES)}", fontsize=10)
    ends.legend(frameon=False, fontsize=9, title="start", title_fontsize=9)
    numbers = [one.components for one in study.clusters.components]
    bounds = [one.elbo for one in study.clusters.components]
    criteria = [-0.5 * one.bic for one in study.clusters.components]
    counts.plot(numbers, criteria, "s-", color=ORANGE, markersize=5, label="-BIC / 2, by EM")
    counts.plot(numbers, bounds, "o-", color=BLUE, markersize=5, label="ELBO, Bayesian")
    for one in study.clusters.components:
        counts.annotate(
            str(one.alive),
            (one.components, one.elbo),
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
    for place in (ends, counts):
        plain(place)
    save(figure, path)


def _ellipses(place: "Axes", found: Clusters) -> None:
    """The rows, and each component as the circles of one and two standard deviations."""
    place.scatter(array(found.rows[:, 0]), array(found.rows[:, 1]), s=5, color=GREY, linewidths=0)
    angle = torch.linspace(0.0, 6.2832, 100, dtype=torch.float64, device="cpu")
    circle = torch.stack([angle.cos(), angle.sin()], 1)
    for mean, covariance in zip(found.means, found.covariances, strict=True):
        factor = torch.linalg.cholesky(covariance)
        for radius in (1.0, 2.0):
            line = mean + radius * circle @ factor.T
            place.plot(array(line[:, 0]), array(line[:, 1]), color=RED, linewidth=1.3)
    place.set(xlabel="$x_1$", ylabel="$x_2$")
    place.set_title(f"{five.MOST} components offered, {len(found.means)} alive", fontsize=10)
    place.set_aspect("equal", "datalim")


def priors(study: Study, path: Path) -> None:
    """Test NLL over fixed scales of the prior, with what variational EM chose; on the right the same enlarged."""
    figure, axes = panels(1, 2, size=(4.8, 3.4))
    for place in axes:
        _scales(place, study.priors)
        place.set(xlabel="scale of the prior")
    axes[0].set_ylabel("test NLL, nats a row")
    axes[1].set_ylim(prior.noise_alone() - 0.02, min(one.mean for one in study.priors.fixed) + ABOVE)
    axes[1].set_title("The same, enlarged", fontsize=10)
    axes[0].set_title(f"{prior.ROWS} rows, network 1-{prior.HIDDEN}-1, Laplace posterior", fontsize=10)
    handles, names = axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    save(figure, path)


def _scales(place: "Axes", found: Priors) -> None:
    means, errors = [one.mean for one in found.fixed], [one.error for one in found.fixed]
    place.errorbar(
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
    one, layers = found.chosen
    place.errorbar(
        one.scales[0],
        one.test_nll.mean,
        yerr=one.test_nll.error,
        fmt="*",
        color=RED,
        markersize=13,
        capsize=3,
        zorder=3,
        label="variational EM: one scale, noise known",
    )
    place.axhline(
        layers.test_nll.mean,
        color=GREEN,
        linestyle="dashed",
        linewidth=1.4,
        label="variational EM: a scale for each layer, noise found",
    )
    place.axhline(prior.noise_alone(), color=GREY, linestyle="dotted", linewidth=1.4, label="sine and noise known")
    place.set_xscale("log")
    place.grid(axis="y", alpha=0.3)
    plain(place)
