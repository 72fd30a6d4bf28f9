"""Figures of draws over the exact posterior, of their errors, of the paths of chains, and of Langevin's bias."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from posterity.numerics import Key
from posterity.posteriors import Samples
from posterity.report.canvas import BLACK, BLUE, GREEN, GREY, ORANGE, RED, array, panels, plain, save
from posterity_studies.logistic.comparison import Row
from posterity_studies.logistic.exact import log_density
from posterity_studies.logistic.fits import SINGLE, Fit
from posterity_studies.logistic.langevin import StepSize
from posterity_studies.logistic.study import Study

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FIRST, SECOND = (-2.2, 6.6), (-2.6, 7.0)  # ranges of the two weights
SIDE = 141  # points of each, for contours
SHARES = (0.99, 0.9, 0.5)  # of the posterior mass inside a contour
DOTS = 500  # draws in a panel, at most
SHOWN = 100  # transitions of a path
PATHS = {"Metropolis, short steps": RED, "Metropolis": ORANGE, "HMC": BLUE}


def draw_samples(study: Study, path: Path) -> None:
    """Draws of each method over contours of the exact posterior."""
    figure, axes = panels(2, 5, size=(2.6, 2.95), sharex=True, sharey=True)
    for panel, (name, fit) in zip(axes, study.fits.items(), strict=True):
        _contours(panel, study)
        first, second = array(_draws(fit, Key(study.settings.seed).fold(name))).T
        panel.scatter(first, second, s=5, color=_colour(name, fit), alpha=0.5, linewidth=0)
        panel.set_title(name, fontsize=11)
        panel.set(xlim=FIRST, ylim=SECOND, aspect="equal", xticks=range(-2, 7, 2), yticks=range(-2, 7, 2))
    for panel in axes[5:]:
        panel.set_xlabel("$w_1$")
    for panel in axes[::5]:
        panel.set_ylabel("$w_2$")
    figure.suptitle(
        "draws over the exact posterior, whose contours hold 50, 90 and 99 %;  "
        "orange: Gaussians, blue: exact chains, red: biased chain",
        fontsize=11,
    )
    save(figure, path)


def _colour(name: str, fit: Fit) -> str:
    if not isinstance(fit.posterior, Samples):
        return ORANGE
    return RED if name == "Langevin" else BLUE


def _draws(fit: Fit, key: Key) -> Tensor:
    """Independent draws: the last of each chain, or of the Gaussian."""
    if isinstance(fit.posterior, Samples):
        return fit.posterior.theta[:DOTS, -1]
    return fit.posterior.sample(DOTS, key)


def draw_errors(study: Study, path: Path) -> None:
    """Errors of mean, covariance and log evidence, and gradients, by method."""
    rows = study.comparison[::-1]  # the first on top
    figure, axes = panels(1, 4, size=(3.0, 3.6), sharey=True)
    columns: tuple[tuple[str, list[float | None], list[float | None]], ...] = (
        ("error of the mean, in sd", *_with_errors(rows, "mean")),
        ("error of the covariance", *_with_errors(rows, "covariance")),
        (
            "error of log p(y), in nats",
            [None if row.evidence_error is None else abs(row.evidence_error) for row in rows],
            [None] * len(rows),
        ),
        ("gradients", [row.gradients for row in rows], [None] * len(rows)),
    )
    for panel, (name, values, errors) in zip(axes, columns, strict=True):
        for index, (row, value, error) in enumerate(zip(rows, values, errors, strict=True)):
            if value is not None:
                panel.scatter(value, index, s=34, color=_colour(row.method, study.fits[row.method]), zorder=3)
            if error is not None:
                panel.scatter(error, index, s=90, color=BLACK, marker="|", zorder=4)
        panel.set_xscale("log")
        panel.set_title(name, fontsize=11)
        panel.grid(axis="both", color=GREY, alpha=0.25)
        plain(panel)
    for panel in axes[:3]:
        panel.set_xlim(1e-3, 1)
    axes[0].set_yticks(range(len(rows)), [row.method for row in rows], fontsize=10)
    label = "standard error of the draws;  no dot: the method has no such number"
    axes[1].scatter([], [], s=90, color=BLACK, marker="|", label=label)
    save(figure, path, legend_of=axes[1], ncols=1)


def _with_errors(rows: Sequence[Row], name: str) -> tuple[list[float | None], list[float | None]]:
    return [getattr(row, f"{name}_error") for row in rows], [getattr(row, f"{name}_standard_error") for row in rows]


def _contours(panel: "Axes", study: Study) -> None:
    """Borders of the smallest regions that hold given shares of the posterior."""
    first, second = (torch.linspace(*ends, SIDE, dtype=torch.float64) for ends in (FIRST, SECOND))
    log_joint = log_density(study.regression, torch.cartesian_prod(first, second)).reshape(SIDE, SIDE)
    density = (log_joint - study.exact.log_evidence).exp()
    levels = study.exact.levels(SHARES)
    panel.contour(array(first), array(second), array(density.T), levels=levels, colors=GREY, linewidths=1.0)


def draw_paths(study: Study, path: Path) -> None:
    """Chains of Metropolis and HMC over contours, and their first weight against the transition."""
    figure, axes = panels(
        2, 3, size=(4.0, 3.0), sharex="row", sharey="row", gridspec_kw={"height_ratios": [2.4, 1.0]}, beside=(0.0, 0.8)
    )
    rows = {row.method: row for row in study.comparison}
    for column, (name, colour) in enumerate(PATHS.items()):
        posterior, row = study.fits[name].posterior, rows[name]
        assert isinstance(posterior, Samples)
        weights = posterior.theta[0, :SHOWN]
        above, below = axes[column], axes[len(PATHS) + column]
        _contours(above, study)
        first, second = array(weights).T
        above.plot(first, second, color=colour, linewidth=0.8, alpha=0.75)
        above.scatter(first, second, s=11, color=colour, linewidth=0, zorder=3)
        cost = f"of {SINGLE} gradients" if name == "HMC" else "of one value"
        above.set_title(
            f"{name}\nmean move {row.move:.2f} sd, accepted {row.acceptance:.0%}\n"
            f"ESS {row.ess_per_transition:.2f} a transition, {cost}",
            fontsize=11,
        )
        above.set(xlim=(-1.4, 5.4), ylim=(-1.8, 5.8), xlabel="$w_1$", aspect="equal")
        below.plot(range(len(weights)), first, color=colour, linewidth=1.0, marker="o", markersize=2)
        below.axhline(float(study.exact.mean[0]), color=GREY, linewidth=0.9, linestyle="dashed", zorder=0)
        below.set(xlabel="transition", xlim=(0, len(weights) - 1))
        plain(below)
    axes[0].set_ylabel("$w_2$")
    axes[len(PATHS)].set_ylabel("$w_1$")
    save(figure, path)


def draw_bias(study: Study, path: Path) -> None:
    """Variances of Langevin steps and of MALA against the step size, with theory."""
    figure, axes = panels(1, 2, size=(5.2, 4.2), sharey=True)
    gaussian, posterior = study.bias.gaussian, study.bias.posterior
    products = torch.linspace(0.0, 1.4, 281, dtype=torch.float64)
    exact = r"$1\,/\,(1 - \gamma h/2)$, exact"
    axes[0].plot(array(products), array(1 / (1 - 0.5 * products)), color=RED, linewidth=1.6, label=exact)
    _measured(axes[0], gaussian, [point.step_size * (point.precision or 1.0) for point in gaussian])
    axes[0].annotate(
        r"$\gamma h = 0.6$: 1 / 0.7 = 1.43", (0.6, 1 / 0.7), (0.66, 1.2), fontsize=10, arrowprops={"arrowstyle": "-"}
    )
    axes[0].set(xlabel=r"$\gamma h$, step size times precision", xlim=(0, 1.4), ylabel="variance / exact variance")
    axes[0].set_title("Gaussian, along both principal axes", fontsize=11)
    sizes = [point.step_size for point in posterior]
    ends = torch.tensor([0.0, sizes[-1]], dtype=torch.float64)
    slope = (posterior[0].theory - 1) / sizes[0]
    first_order = r"first order in $\gamma$, by quadrature"
    axes[1].plot(array(ends), array(1 + slope * ends), color=RED, linewidth=1.6, linestyle="dashed", label=first_order)
    _measured(axes[1], posterior, sizes)
    axes[1].set(xlabel=r"$\gamma$, step size", xlim=(0, 0.85))
    axes[1].set_title("posterior of the logistic regression, mean of all directions", fontsize=11)
    for panel in axes:
        panel.axhline(1.0, color=GREY, linewidth=0.9, zorder=0)
        panel.set_ylim(0.8, 3.2)
        panel.legend(frameon=False, fontsize=10, loc="upper left")
        plain(panel)
    save(figure, path)


def _measured(panel: "Axes", points: tuple[StepSize, ...], at: list[float]) -> None:
    """Points with two standard errors to each side, most of which are smaller than the markers."""
    for name, colour, marker in (("langevin", RED, "o"), ("mala", GREEN, "^")):
        values = [getattr(point, name) for point in points]
        errors = [2 * getattr(point, f"{name}_error") for point in points]
        label = "Langevin, measured" if name == "langevin" else "MALA, measured"
        panel.errorbar(at, values, errors, color=colour, linestyle="none", marker=marker, markersize=5, label=label)
