"""Figures of penalties with their priors, and of signals in deep random networks."""

import math
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
_DROP = 5.5  # nats below its mode at which a density is as good as nothing
_REACH = 4.0  # the range shown where there is no density


def penalty_figure(
    penalty: Penalty,
    family: Family,
    priors: Mapping[str, LogDensity],
    path: Path,
    *,
    nearest: Divergence | None = None,
    near_to: str = "the prior",
    of: str = "the prior",
    group: tuple[int, int] = (1, 1),
    title: str = "",
) -> None:
    """Draw a penalty, with the KL that it is or is near to, and the density and log density of its priors by label.

    Takes the penalty with the family that reads it, log densities by label (none where there is no prior), the KL
    to draw beside the penalty with what it is to (`near_to`), what the densities are `of`, and the shape of one group
    of weights, along whose diagonal all is drawn.
    """
    figure, axes = panels(1, 3 if priors else 1, size=(4.0, 3.5))
    half = _half_range(priors)
    lengths = torch.linspace(-half, half, POINTS, dtype=torch.float64, device="cpu")
    single = group == (1, 1)
    _draw_penalty(axes[0], penalty, family, nearest, near_to, lengths, group)
    axes[0].set_xlabel(r"$\mu$" if single else r"$\pm\|\mu_g\|$", fontsize=10)
    for place, kind in zip(axes[1:], ("density", "log density"), strict=False):
        for (label, log_density), colour in zip(priors.items(), _colours(len(priors)), strict=True):
            logs = log_density(lengths)
            values = logs.exp() if kind == "density" else logs
            place.plot(array(lengths), array(values), color=colour, linewidth=1.6, label=label)
            if kind == "density":
                place.fill_between(array(lengths), array(values), color=colour, alpha=0.12, linewidth=0)
        place.set_title(f"{kind} of {of}" + ("" if single else ", along a line"), fontsize=10.5, pad=12)
        place.set_xlabel("$w$" if single else r"$\pm\|w_g\|$", fontsize=10)
        place.set_ylabel("nats" if kind == "log density" else "", fontsize=10)
        plain(place)
    if priors:
        axes[1].set_ylim(bottom=0.0)
    if len(priors) > 1:
        axes[2].legend(frameon=False, fontsize=8.5)
    if len(axes[0].get_lines()) > 1:
        _legend_below(figure, axes[0])
    figure.suptitle(title.replace("$", r"\$"), fontsize=11.5)
    save(figure, path)


def signals_figure(runs: Mapping[str, Sequence[Signals]], path: Path, *, title: str = "") -> None:
    """Draw variance and correlation by layer: means of drawn networks as dots, infinite width as lines.

    Takes by label the `Signals` of several networks of one kind; bars are standard errors of the mean.
    """
    figure, axes = panels(1, 2, size=(4.8, 3.6))
    for (label, several), colour in zip(runs.items(), (BLUE, BLACK, ORANGE), strict=False):
        for place, part in zip(axes, ("variance", "correlation"), strict=True):
            drawn = torch.stack([getattr(one, part) for one in several])  # (networks, layers)
            expected = getattr(several[0], f"mean_field_{part}")
            layers = array(torch.arange(len(expected), device="cpu"))
            bars = array(drawn.std(0) / math.sqrt(len(several))) if len(several) > 1 else None
            place.plot(layers, array(expected), color=colour, linewidth=1.4, label=label)
            place.errorbar(layers, array(drawn.mean(0)), bars, color=colour, fmt="o", markersize=2.6, elinewidth=0.7)
    axes[0].set_yscale("log")  # without biases q falls or grows exponentially
    for place, name in zip(axes, ("variance $q$ of pre-activations", "correlation $c$ of two inputs"), strict=True):
        place.set_title(name, fontsize=10.5)
        place.set_xlabel("layer", fontsize=10)
        plain(place)
    _legend_below(figure, axes[0])
    figure.suptitle(title, fontsize=11.5)
    save(figure, path)


def penalty_along(penalty: Penalty, lengths: Tensor, scale: float, group: tuple[int, int] = (1, 1)) -> Tensor:
    """r of one weight, or of one group of equal weights, whose means have these signed lengths: (T,) -> (T,)."""
    if penalty.separates:
        return penalty.each(lengths, torch.full_like(lengths, scale))
    size = math.prod(group)
    means = (lengths / math.sqrt(size)).unsqueeze(-1).expand(-1, size)  # (T, n)
    if isinstance(penalty, Divergence) and isinstance(penalty.target, GroupLasso) and scale:
        return penalty.target.bound(Layout.of({"weight": group})).kl(means, torch.full_like(means, scale))
    return torch.stack([penalty.of(mean.reshape(group), mean.new_full(group, scale)) for mean in means])


def _draw_penalty(
    place: "Axes",
    penalty: Penalty,
    family: Family,
    nearest: Divergence | None,
    of: str,
    lengths: Tensor,
    group: tuple[int, int],
) -> None:
    """r less the constant that brings it nearest to the KL, where there is one; a colour for each scale."""
    values = torch.stack([penalty_along(penalty, lengths, scale, group) for scale in family.scales])
    colours = _colours(len(family.scales))
    is_kl = isinstance(penalty, Divergence) and family.scales != (0.0,)
    if nearest is not None:
        others = torch.stack([penalty_along(nearest, lengths, scale, group) for scale in family.scales])
        values = values - (values - others).mean()
        for scale, colour, other in zip(family.scales, colours, others, strict=True):
            label = rf"KL, $\sigma$ = {scale:g}"
            place.plot(array(lengths), array(other), color=colour, linewidth=3.2, alpha=0.45, label=label)
    varies = len(values) > 1 and not torch.allclose(values, values[:1].expand_as(values))
    letter = "KL" if is_kl else "$r$"
    labels = [rf"{letter}, $\sigma$ = {scale:g}" for scale in family.scales] if varies else [letter]
    for label, colour, value in zip(labels, colours if varies else [BLACK], values, strict=False):
        style = "dashed" if nearest is not None else "solid"
        place.plot(array(lengths), array(value), color=colour, linestyle=style, linewidth=1.6, label=label)
    beside = "" if nearest is None else f" $r - K$ beside the KL to {of}"
    place.set_title("KL to the prior" if is_kl else f"penalty{beside}", fontsize=10.5, pad=12)
    place.set_ylabel("nats", fontsize=10)
    plain(place)


def _legend_below(figure: "Figure", place: "Axes") -> None:
    """The lines of one panel, told under all of them."""
    lines = [line for line in place.get_lines() if not str(line.get_label()).startswith("_")]  # not those of error bars
    labels = [str(line.get_label()) for line in lines]
    figure.legend(lines, labels, loc="outside lower center", ncols=len(lines), frameon=False, fontsize=9)


def _half_range(priors: Mapping[str, LogDensity]) -> float:
    """How far from 0 the densities are worth being shown."""
    halves = torch.logspace(-4, 4, 801, dtype=torch.float64, device="cpu")
    found = [
        float(halves[torch.maximum(logs, mirrored) > torch.maximum(logs, mirrored).max() - _DROP].max())
        for logs, mirrored in ((one(halves), one(-halves)) for one in priors.values())
    ]
    return max(found, default=_REACH)


def _colours(count: int) -> list[str]:
    return [(SKY, BLUE, GREEN, ORANGE, RED, PINK)[index % 6] if count > 1 else BLUE for index in range(count)]
