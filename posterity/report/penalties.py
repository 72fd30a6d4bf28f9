"""Figures of penalties with their priors, and of signals in deep random networks."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from posterity.numerics.layout import Layout
from posterity.penalties import Divergence, Family, Penalty
from posterity.priors import GroupLasso
from posterity.report.canvas import BLACK, BLUE, GREEN, ORANGE, PINK, RED, SKY, array, panels, plain, save
from posterity.theory import Signals

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

POINTS = 321  # an odd number: 0 is among them
LogDensity = Callable[[Tensor], Tensor]
_DROP = 5.5  # nats below its mode at which a density is negligible
_REACH = 4.0  # the range shown where there is no density
_SIGNS = {
    r"\bmu\b": "μ",
    r"\bsigma\b": "\N{GREEK SMALL LETTER SIGMA}",
    " - ": " \N{MINUS SIGN} ",
    r"(?<=\w)\*(?=\w)": "·",
}
_RAISED = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


def penalty_figure(
    penalty: Penalty,
    family: Family,
    priors: Mapping[str, LogDensity],
    path: Path,
    *,
    nearest: Divergence | None,
    near_to: str,
    of: str,
    group: tuple[int, int],
    title: str,
) -> None:
    """Draw a penalty, with the KL that it is or is near to, and the density and log density of its priors by label.

    `priors` has log densities by label. `nearest` is a KL to draw next to the penalty, and `near_to` the name of its
    target; `of` names the densities in titles. Curves are along the diagonal of a `group` of weights of this shape.
    """
    figure, axes = panels(1, 3 if priors else 1, size=(4.0, 3.5))
    half = _half_range(priors)
    lengths = torch.linspace(-half, half, POINTS, dtype=torch.float64, device="cpu")
    single = group == (1, 1)
    _draw_penalty(axes[0], penalty, family, nearest, near_to, lengths, group)
    axes[0].set_xlabel(r"$\mu$" if single else r"$\pm\|\mu_g\|$", fontsize=10)
    for panel, kind in zip(axes[1:], ("density", "log density"), strict=False):
        for (label, log_density), colour in zip(priors.items(), _colours(len(priors)), strict=True):
            logs = log_density(lengths)
            values = logs.exp() if kind == "density" else logs
            panel.plot(array(lengths), array(values), color=colour, linewidth=1.6, label=label)
            if kind == "density":
                panel.fill_between(array(lengths), array(values), color=colour, alpha=0.12, linewidth=0)
        panel.set_title(f"{kind} of {of}" + ("" if single else ", along a line"), fontsize=10.5, pad=12)
        panel.set_xlabel("$w$" if single else r"$\pm\|w_g\|$", fontsize=10)
        panel.set_ylabel("nats" if kind == "log density" else "", fontsize=10)
        plain(panel)
    if priors:
        axes[1].set_ylim(bottom=0.0)
    if len(priors) > 1:
        axes[2].legend(frameon=False, fontsize=8.5)
    if len(axes[0].get_lines()) > 1:
        _legend_below(figure, axes[0])
    figure.suptitle(in_signs(title).replace("$", r"\$"), fontsize=11.5)
    save(figure, path)


def in_signs(formula: str) -> str:
    """Return a typed formula with Greek letters, raised numbers and signs.

    >>> in_signs("sum of (mu^2/2 - 0.5*sigma)")
    'sum of (μ²/2 \N{MINUS SIGN} 0.5·σ)'
    """
    for typed, sign in _SIGNS.items():
        formula = re.sub(typed, sign, formula)
    return re.sub(r"\^(\d+)", lambda power: power[1].translate(_RAISED), formula)


def signals_figure(runs: Mapping[str, Sequence[Signals]], path: Path, *, title: str) -> None:
    """Draw variance and correlation by layer: means of drawn networks as dots, infinite width as lines.

    Takes by label the `Signals` of several networks of one kind; bars are standard errors of the mean.
    """
    figure, axes = panels(1, 2, size=(4.8, 3.6))
    for (label, several), colour in zip(runs.items(), (BLUE, BLACK, ORANGE), strict=False):
        for panel, part in zip(axes, ("variance", "correlation"), strict=True):
            drawn = torch.stack([getattr(signals, part) for signals in several])  # (networks, layers)
            expected = getattr(several[0], f"mean_field_{part}")
            layers = array(torch.arange(len(expected), device="cpu"))
            bars = array(drawn.std(0) / math.sqrt(len(several))) if len(several) > 1 else None
            panel.plot(layers, array(expected), color=colour, linewidth=1.4, label=label)
            panel.errorbar(layers, array(drawn.mean(0)), bars, color=colour, fmt="o", markersize=2.6, elinewidth=0.7)
    axes[0].set_yscale("log")  # without biases q falls or grows exponentially
    low, high = axes[0].get_ylim()
    if high < 100.0 * low:  # plain numbers in place of 6 x 10^-1
        axes[0].yaxis.set_major_formatter("{x:g}")
        axes[0].yaxis.set_minor_formatter("{x:g}")
    for panel, name in zip(axes, ("variance $q$ of pre-activations", "correlation $c$ of two inputs"), strict=True):
        panel.set_title(name, fontsize=10.5)
        panel.set_xlabel("layer", fontsize=10)
        plain(panel)
    _legend_below(figure, axes[0])
    figure.suptitle(title, fontsize=11.5)
    save(figure, path)


def penalty_along(penalty: Penalty, lengths: Tensor, scale: float, group: tuple[int, int]) -> Tensor:
    """Return r of one weight, or of a group of equal weights, at means of these signed lengths: (T,) -> (T,)."""
    if penalty.separates:
        return penalty.each(lengths, torch.full_like(lengths, scale))
    size = math.prod(group)
    means = (lengths / math.sqrt(size)).unsqueeze(-1).expand(-1, size)  # (T, n)
    if isinstance(penalty, Divergence) and isinstance(penalty.target, GroupLasso) and scale:
        return penalty.target.bound(Layout.of({"weight": group})).kl(means, torch.full_like(means, scale))
    return torch.stack([penalty.of(mean.reshape(group), mean.new_full(group, scale)) for mean in means])


def _draw_penalty(
    panel: "Axes",
    penalty: Penalty,
    family: Family,
    nearest: Divergence | None,
    near_to: str,
    lengths: Tensor,
    group: tuple[int, int],
) -> None:
    """Draw r less the constant that brings it nearest to the KL, if any, in a colour for each scale."""
    values = torch.stack([penalty_along(penalty, lengths, scale, group) for scale in family.scales])
    colours = _colours(len(family.scales))
    is_kl = isinstance(penalty, Divergence) and family.scales != (0.0,)
    if nearest is not None:
        others = torch.stack([penalty_along(nearest, lengths, scale, group) for scale in family.scales])
        values = values - (values - others).mean()
        for scale, colour, other in zip(family.scales, colours, others, strict=True):
            label = rf"KL, $\sigma$ = {scale:g}"
            panel.plot(array(lengths), array(other), color=colour, linewidth=3.2, alpha=0.45, label=label)
    varies = len(values) > 1 and not torch.allclose(values, values[:1].expand_as(values))
    letter = "KL" if is_kl else "$r$"
    labels = [rf"{letter}, $\sigma$ = {scale:g}" for scale in family.scales] if varies else [letter]
    for label, colour, value in zip(labels, colours if varies else [BLACK], values, strict=False):
        style = "dashed" if nearest is not None else "solid"
        panel.plot(array(lengths), array(value), color=colour, linestyle=style, linewidth=1.6, label=label)
    beside = "" if nearest is None else f" $r - K$ beside the KL to {near_to}"
    panel.set_title("KL to the prior" if is_kl else f"penalty{beside}", fontsize=10.5, pad=12)
    panel.set_ylabel("nats", fontsize=10)
    plain(panel)


def _legend_below(figure: "Figure", panel: "Axes") -> None:
    """Draw a legend of the lines of a panel below the figure."""
    lines = [line for line in panel.get_lines() if not str(line.get_label()).startswith("_")]  # no error bars
    labels = [str(line.get_label()) for line in lines]
    figure.legend(lines, labels, loc="outside lower center", ncols=len(lines), frameon=False, fontsize=9)


def _half_range(priors: Mapping[str, LogDensity]) -> float:
    """Return the distance from 0 beyond which all densities are negligible."""
    halves = torch.logspace(-4, 4, 801, dtype=torch.float64, device="cpu")
    larger = [torch.maximum(log_density(halves), log_density(-halves)) for log_density in priors.values()]
    return max((float(halves[logs > logs.max() - _DROP].max()) for logs in larger), default=_REACH)


def _colours(count: int) -> list[str]:
    return [(SKY, BLUE, GREEN, ORANGE, RED, PINK)[index % 6] if count > 1 else BLUE for index in range(count)]
