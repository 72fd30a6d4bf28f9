"""Figures of the study."""

import math
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from posterity.report.canvas import BLACK, BLUE, GREEN, GREY, ORANGE, RED, array, panels, plain, save
from posterity.theory import Neurons
from posterity_studies.collapse import optima
from posterity_studies.collapse.flow import SPREAD, TAU, Particles
from posterity_studies.collapse.optima import Untempered
from posterity_studies.collapse.study import Study
from posterity_studies.frame import draw_all, shades

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = (BLUE, RED, GREEN)
SHOWN = (0, 2, 4, 8)  # indices of the widths whose predictions are drawn
POINTS = 200
DENSITY_TIMES, BANDWIDTH = (1.0, 5.0, 30.0), 0.2
RESOLVED = 1e-10  # nats: below it the distance from the optimum is rounding


def draw(study: Study, folder: Path) -> list[str]:
    """Draw the figures of the study into the folder; return the names of the files."""
    figures = {
        "kl.png": kl,
        "gap.png": gap,
        "balanced.png": balanced,
        "confidence.png": confidence,
        "flow.png": flow,
        "functions.png": functions,
    }
    return draw_all(figures, study, folder)


def kl(study: Study, path: Path) -> None:
    """KL(q* || P0) of the whole network at eta = 1 with the laws of theory, and how far it is from them.

    Where a neuron's KL is 1e-20 the sixth digit is rounding: the distance of an odd activation ends there.
    """
    figure, (left, right) = panels(1, 2, size=(4.8, 3.6))
    for colour, case in zip(COLOURS, (study.rectified, study.odd, study.classes), strict=True):
        name = f"{case.case.name}: slope {_number(case.slope)}"
        left.loglog(array(case.widths), array(case.network_kl), "o", color=colour, markersize=5, label=name)
        law = array(case.law.kl(case.widths))
        left.loglog(array(case.widths), law, color=colour, linewidth=1.2, linestyle="dashed")
        off = (case.ratio - 1.0).abs()
        right.loglog(array(case.widths), array(off), "o-", color=colour, markersize=5, linewidth=1.2)
    left.plot([], [], color=GREY, linestyle="dashed", linewidth=1.2, label="theory, slopes $-1$ and $-3$")
    left.set(xlabel="width N", ylabel="KL(q* ‖ $P_0$) of the network, nats", title=r"Collapse at $\eta$ = 1")
    right.set(xlabel="width N", ylabel="|KL / theory $-$ 1|", title="Distance from theory, with its constant")
    left.legend(frameon=False, fontsize=8, loc="lower left")
    _finish(left, right)
    save(figure, path)


def gap(study: Study, path: Path) -> None:
    """The gap of the theorem with its bound: at fixed neurons, and at optima."""
    figure, axes = panels(1, 3, size=(3.9, 3.7), sharey=True)
    classes = study.classes.case.name
    fixed = [(gap.name, gap) for gap in study.gaps if not gap.case]
    line = [(f"{gap.case}, {gap.name}", gap) for gap in study.gaps if gap.case not in ("", classes)]
    groups = [(gap.name, gap) for gap in study.gaps if gap.case == classes]
    for panel, some, colours in (
        (axes[0], fixed, COLOURS),
        (axes[1], line, (BLACK, ORANGE, *COLOURS)),
        (axes[2], groups, (BLACK, *COLOURS)),
    ):
        for colour, (name, gap) in zip(colours, some, strict=False):
            symbols = name.replace("eta =", r"$\eta$ =").replace("tau =", r"$\tau$ =")
            label = f"{symbols}: {_number(gap.slope)}"
            panel.loglog(array(gap.widths), array(gap.gap), "o", color=colour, markersize=4.5, label=label)
            panel.loglog(array(gap.widths), array(gap.bound), color=colour, linewidth=1.0, linestyle="dashed")
        panel.plot([], [], color=GREY, linestyle="dashed", linewidth=1.0, label="bound of the theorem")
        panel.set_xlabel("width N")
        panel.legend(frameon=False, fontsize=8, loc="lower left", title="slopes", title_fontsize=8, alignment="left")
    lowest = min(float(gap.gap.min()) for gap in study.gaps)
    axes[0].set(ylabel=r"$\tilde F -$ ELBO, nats", ylim=(3e-4 * lowest, None), title="The same neurons at all widths")
    axes[1].set_title("The optimum of each width")
    axes[2].set_title(f"The same, {classes}")
    _finish(*axes)
    save(figure, path)


def balanced(study: Study, path: Path) -> None:
    """Predictions at eta = 1 and at the balanced temperature; KL of a neuron; and distances from the limit."""
    figure, axes = panels(2, 2, size=(4.8, 3.4))
    tempered, middle = study.balanced, len(study.balanced.taus) // 2
    _predictions(axes[0], study.rectified, study.rectified.optima.neurons.theta)
    axes[0].set_title(r"$\eta$ = 1")
    _predictions(axes[1], study.rectified, tempered.optima.neurons.theta[middle])
    axes[1].set_title(rf"$\eta$ = $\tau$ p/N, $\tau$ = {float(tempered.taus[middle]):g}")
    axes[1].sharey(axes[0])
    axes[0].legend(frameon=False, fontsize=8, loc="upper center", ncols=2)
    collapsed = array(study.rectified.optima.kl)
    axes[2].loglog(array(tempered.widths), collapsed, "s-", color=BLACK, markersize=4, label=r"$\eta$ = 1")
    for index, (colour, tau) in enumerate(zip(COLOURS, tempered.taus.tolist(), strict=False)):
        own = array(tempered.optima.kl[index])
        axes[2].loglog(array(tempered.widths), own, "o-", color=colour, markersize=4, label=rf"$\tau$ = {tau:g}")
        name = rf"$\tau$ = {tau:g}: slope {_number(tempered.slopes[index])}"
        axes[3].loglog(
            array(tempered.widths), array(tempered.distance[index]), "o", color=colour, markersize=4.5, label=name
        )
        law = tempered.distance[index, -1] * tempered.widths[-1] / tempered.widths
        axes[3].loglog(array(tempered.widths), array(law), color=colour, linestyle="dashed", linewidth=1)
    axes[2].set(xlabel="width N", ylabel="KL of a neuron, nats", title="KL(q* ‖ $P_0$) / N")
    axes[3].set(xlabel="width N", ylabel="distance from the limit", title="Parameters of the neurons")
    axes[2].legend(frameon=False, fontsize=8, loc="lower left")
    axes[3].plot([], [], color=GREY, linestyle="dashed", linewidth=1, label="1/N")
    axes[3].legend(frameon=False, fontsize=8, loc="lower left")
    _finish(*axes)
    save(figure, path)


def confidence(study: Study, path: Path) -> None:
    """Confidence and NLL of the averaged prediction of classes against the width."""
    figure, (left, right) = panels(1, 2, size=(4.8, 3.4))
    result, widths, number = study.confidence, study.classes.widths, study.classes.case.outputs
    for panel, values, many in (
        (left, result.untempered.confidence, result.balanced.confidence),
        (right, result.untempered.nll, result.balanced.nll),
    ):
        panel.semilogx(array(widths), array(values), "s-", color=BLACK, markersize=4.5, label=r"$\eta$ = 1")
        for colour, row, tau in zip(COLOURS, many, study.balanced_classes.taus.tolist(), strict=False):
            panel.semilogx(array(widths), array(row), "o-", color=colour, markersize=4, label=rf"$\tau$ = {tau:g}")
        panel.set_xlabel("width N")
    left.axhline(1.0 / number, color=GREY, linestyle="dashed", linewidth=1.2)
    highest = math.log(number)
    right.axhline(highest, color=GREY, linestyle="dashed", linewidth=1.2)
    right.annotate("log K", (float(widths[0]), highest), (0, -12), textcoords="offset points", fontsize=9, color=GREY)
    left.annotate("1/K", (float(widths[0]), 1.0 / number), (0, 4), textcoords="offset points", fontsize=9, color=GREY)
    left.set(ylabel="confidence of the averaged prediction", ylim=(0.28, 1.0))
    right.set(ylabel="NLL of the rows, nats")
    left.legend(frameon=False, fontsize=8.5, loc=(0.68, 0.24))
    _finish(left, right)
    save(figure, path)


def flow(study: Study, path: Path) -> None:
    """Paths of the particles over F'(nu*), their density at some times, and F on its way to the optimum."""
    figure, (paths, density, rise) = panels(1, 3, size=(4.2, 3.8))
    result, reach = study.particles, 1.05 * SPREAD
    few, many = (flow.neurons for flow in result.flows.values())
    best = torch.cat([result.best.inner_mean, -result.best.inner_mean]).squeeze(-1)
    _variation(paths, result, 1.25 * reach)
    outer, inner = few.outer_mean.squeeze(-1), few.inner_mean.squeeze(-1)  # (T, J)
    paths.plot(array(outer), array(inner), color=BLUE, linewidth=0.8, alpha=0.7)
    paths.plot(array(outer[0]), array(inner[0]), ".", color=BLUE, markersize=4, label="particles at s = 0")
    for sign in (1.0, -1.0):
        at = sign * float(result.best.outer_mean), sign * float(result.best.inner_mean)
        paths.plot(*at, "*", color=RED, markersize=13, zorder=4, label=r"optimum $\nu^*$" if sign > 0.0 else None)
    paths.set(xlabel="$m_a$, mean of the outer weight", ylabel="$m_b$, mean of the inner weight")
    paths.set_title(r"Particles over the level lines of $F\,'(\nu^*)$", fontsize=11)
    paths.set(xlim=(-reach, reach), ylim=(-reach, 1.25 * reach))
    paths.legend(frameon=True, framealpha=1.0, edgecolor="none", fontsize=9, loc="upper center", ncols=2)
    times = result.flows[many.count].times
    grid = torch.linspace(-1.2 * reach, 1.2 * reach, POINTS, dtype=torch.float64, device="cpu")
    shown = [0, *(int((times - time).abs().argmin()) for time in DENSITY_TIMES)]
    for colour, index in zip(shades(len(shown)), shown, strict=True):
        values = _smoothed(grid, many.inner_mean[index].squeeze(-1))
        name = f"s = {float(times[index]):.2g}"
        density.plot(array(grid), array(values), color=colour, linewidth=1.8, label=name)
    density.plot(
        array(grid), array(_smoothed(grid, best)), color=RED, linewidth=1.6, linestyle="dashed", label=r"$\nu^*$"
    )
    density.set(xlabel="$m_b$", ylabel=f"density, smoothed by {BANDWIDTH:g}", ylim=(0, None))
    density.set_title("Density of the particles", fontsize=11)
    density.legend(frameon=False, fontsize=9, loc="upper right")
    for colour, number in zip((ORANGE, BLUE), result.flows, strict=True):
        times, below = result.flows[number].times[1:], result.below(number)[1:]
        seen = below > RESOLVED
        rise.loglog(array(times[seen]), array(below[seen]), color=colour, linewidth=1.8, label=f"{number} particles")
    rise.set(xlabel="time s", ylabel=r"$F(\nu^*) - F(\nu_s)$, nats per row")
    rise.set_title("The functional reaches its optimum", fontsize=11)
    rise.legend(frameon=False, fontsize=9, loc="lower left")
    for panel in (density, rise):
        plain(panel)
    save(figure, path)


def functions(study: Study, path: Path) -> None:
    """Functions of a network with scales of 1 and with matched ones, of the process itself, and covariances."""
    figure, axes = panels(1, 4, size=(3.4, 3.2))
    result, colours = study.functions, (ORANGE, BLUE, BLACK)
    x = array(result.x)
    highest = 1.1 * max(float(draws.abs().max()) for draws in result.draws.values())
    for panel, (name, draws), colour in zip(axes, result.draws.items(), colours, strict=False):
        panel.plot(x, array(draws.T), color=colour, linewidth=1.1, alpha=0.8)
        distance = result.distances[name]
        panel.set_title(f"{name[0].upper()}{name[1:]}" + (f": $W_2$ = {distance:.2f}" if distance else ""), fontsize=11)
        panel.set(xlabel="x", ylim=(-highest, highest))
        plain(panel)
    axes[0].set_ylabel("f(x)")
    middle = len(x) // 2
    for (name, covariance), colour in zip(result.covariances.items(), colours, strict=True):
        style = "dashed" if colour == BLACK else "solid"
        axes[3].plot(x, array(covariance[middle]), color=colour, linewidth=1.8, linestyle=style, label=name)
    axes[3].set(xlabel="x", ylim=(-0.05, None))
    axes[3].set_title("Covariance of f(0) and f(x)", fontsize=11)
    axes[3].legend(frameon=False, fontsize=9)
    plain(axes[3])
    save(figure, path)


def _variation(panel: "Axes", result: Particles, reach: float) -> None:
    """Draw level lines of F'(nu*) over the means of a neuron, at the best scales."""
    axis = torch.linspace(-reach, reach, 61, dtype=torch.float64, device="cpu")
    outer, inner = (mean.reshape(-1, 1) for mean in torch.meshgrid(axis, axis, indexing="xy"))
    neurons = Neurons(outer, result.best.outer_scale.expand_as(outer), inner, result.best.inner_scale.expand_as(inner))
    values = result.problem.first_variation(result.best, neurons, TAU).reshape(
        len(axis), len(axis)
    )  # rows are the second
    panel.contour(array(axis), array(axis), array(values), levels=10, colors=GREY, linewidths=0.6, linestyles="solid")


def _smoothed(grid: Tensor, at: Tensor) -> Tensor:
    """Return a kernel density estimate (G,) of points (J,), with a normal kernel."""
    kernels = (-0.5 * ((grid.unsqueeze(1) - at) / BANDWIDTH).square()).exp().mean(1)
    return kernels / (BANDWIDTH * math.sqrt(2.0 * math.pi))


def _number(value: float) -> str:
    return f"{value:.4f}".replace("-", "\N{MINUS SIGN}")


def _predictions(panel: "Axes", untempered: Untempered, theta: Tensor) -> None:
    """E f along the line for some widths, with theta (W, J, .), over the rows."""
    problem = untempered.case.problem
    along = optima.line(POINTS, problem.activation)
    panel.plot(array(problem.inputs[:, 0]), array(problem.targets), ".", color=GREY, markersize=5)
    shown = [number for number in SHOWN if number < len(untempered.widths)]
    for colour, number in zip(shades(len(shown)), shown, strict=True):
        mean = along.law(Neurons.from_theta(theta[number]), float(untempered.widths[number])).mean.squeeze(-1)
        name = f"N = {int(untempered.widths[number]):,}"
        thick = 0.9 + 1.0 * (len(shown) - 1 - shown.index(number))  # curves that coincide are all seen
        panel.plot(array(along.inputs[:, 0]), array(mean), color=colour, linewidth=thick, label=name)
    panel.set(xlabel="x", ylabel="mean prediction")


def _finish(*axes: "Axes") -> None:
    for panel in axes:
        panel.title.set_fontsize(11)
        plain(panel)
