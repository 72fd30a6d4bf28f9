"""Figures of Markov chains: traces, ranks of draws, energies."""

import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from posterity.diagnostics import bulk_ess, e_bfmi, rhat
from posterity.diagnostics.convergence import ENERGY, RHAT
from posterity.errors import positive_whole, shown, unknown
from posterity.posteriors.samples import Samples
from posterity.report.canvas import BLACK, BLUE, GREEN, GREY, ORANGE, PINK, RED, SKY, array, gentle, panels, plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FEW = 8  # chains that can be told apart by colour, or have a row of bars each
MOST = 12  # quantities in one figure
POINTS = 1000  # of a trace; more hide each other
CANDIDATES = 1000  # quantities whose R-hat is computed
COLOURS = (BLUE, ORANGE, GREEN, PINK, SKY, BLACK, GREY, "#6a3d9a")  # red marks problems only

Draws = Samples | Mapping[str, Tensor]


def trace_plot(q: Draws, names: Sequence[str] | None = None) -> "Figure":
    """Draw every chain of up to 12 quantities over its draws, with the distribution of each chain beside it.

    Takes samples, or draws (C, D) or (C, D, *event) by name (a network's outputs, say), and the names of tensors
    (patterns such as `head.*`) or of single numbers (`weight[0, 1]`) to show; without them, or where these are more
    than 12 numbers, the 12 of largest R-hat (among 1,000, evenly spaced). Red marks below are draws whose transition
    diverged. Chains that mix look alike and without direction.
    """
    chosen = _chosen(q, names)
    wide = 1 if len(chosen) <= 4 else 2
    rows = math.ceil(len(chosen) / wide)
    figure, axes = panels(rows, 2 * wide, size=(3.4, 1.55), sharey=False, width_ratios=[4.2, 1.0] * wide)
    divergent = q.statistics.get("divergent") if isinstance(q, Samples) else None
    for index, (name, draws) in enumerate(chosen.items()):
        trace, side = axes[2 * index], axes[2 * index + 1]
        side.sharey(trace)
        _trace(trace, draws)
        _marginals(side, draws)
        if divergent is not None and bool(divergent.any()):
            at = torch.nonzero(divergent.any(0))[:, 0]
            low = trace.get_ylim()[0]
            trace.plot(array(at), [low] * len(at), "|", color=RED, markersize=7, clip_on=False)
            trace.set_ylim(bottom=low)
        _title(trace, name, draws, letters=80)
        if index >= len(chosen) - wide:
            trace.set_xlabel("draw", fontsize=9)
    for panel in axes[2 * len(chosen) :]:
        panel.set_visible(False)
    _legend(figure, _chains(next(iter(chosen.values()))), divergent is not None and bool(divergent.any()))
    return figure


def rank_plot(q: Draws, names: Sequence[str] | None = None, bins: int = 20) -> "Figure":
    """Draw histograms of the ranks that the draws of each chain have among all draws of up to 12 quantities.

    Takes what `trace_plot` takes and the number of bins; one chain is shown as its two halves. Chains that agree have
    ranks in all bins alike: bars at the dashed line, or, for more than 8 chains, pale rows, whose colours are standard
    deviations of independent draws from that line.
    """
    positive_whole("rank_plot: bins", bins)
    chosen = _chosen(q, names)
    rows = math.ceil(len(chosen) / 4)
    columns = math.ceil(len(chosen) / rows)
    alone = len(next(iter(chosen.values()))) == 1
    chains, length = _rows(next(iter(chosen.values()))).shape
    bins = max(2, min(bins, length // 5))
    height = 0.9 + min(2.6, 0.3 * max(chains, 3))
    figure, axes = panels(rows, columns, size=(3.1, height), sharex=True, sharey=True)
    expected = length / bins
    image: Any = None
    for panel, (name, draws) in zip(axes, chosen.items(), strict=False):
        counts = _rank_counts(_rows(draws), bins)
        if chains <= FEW:
            _bars(panel, counts, expected)
        else:
            spread = math.sqrt(expected * (1.0 - 1.0 / bins))
            edges = (-0.5, bins - 0.5, chains - 0.5, -0.5)
            shades: dict[str, Any] = {
                "cmap": gentle("RdBu_r", 0.08, 0.92),
                "vmin": -5,
                "vmax": 5,
                "interpolation": "nearest",
            }
            image = panel.imshow(array((counts - expected) / spread), aspect="auto", extent=edges, **shades)
            panel.locator_params(axis="y", integer=True)
        _title(panel, name, draws, letters=44)
        first, last = panel.set_xticks([-0.5, bins - 0.5], ["1", f"{chains * length:,}"])
        first.label1.set_horizontalalignment("left")  # labels of neighbouring panels must not overlap
        last.label1.set_horizontalalignment("right")
    for index, panel in enumerate(axes):
        if index >= len(chosen):
            panel.set_visible(False)
        elif index >= len(chosen) - columns:
            panel.set_xlabel("rank among all draws", fontsize=9, labelpad=0)
            panel.xaxis.set_tick_params(labelbottom=True)
        if index % columns == 0:
            panel.set_ylabel("half" if alone else "chain", fontsize=9)
    if image is not None:
        shrink = min(1.0, 2.2 / (rows * height))
        bar = figure.colorbar(image, ax=axes, shrink=shrink, aspect=18, pad=0.02, extend="both")
        bar.set_label("standard deviations", fontsize=9)
        bar.ax.tick_params(labelsize=8)
    return figure


def energy_plot(q: Samples | Tensor) -> "Figure":
    """Draw energies (C, D) less their mean, their changes between draws, and E-BFMI by chain.

    Takes samples with energies among their statistics, or the energies. Jumps that are much narrower than the energies
    themselves mean that momenta do not take a chain through its tails: E-BFMI below the dashed line.
    """
    energy = q.statistics.get("energy") if isinstance(q, Samples) else q
    if energy is None or energy.dim() != 2 or energy.shape[1] < 2:
        raise ValueError(
            "energy_plot needs energies (chains, draws) of at least 2 draws, those of a sampler with momenta. "
            f"Got {shown(q)}."
        )
    energy = energy.detach().cpu().double()
    away, jumps = (energy - energy.mean(1, keepdim=True)).flatten(), energy.diff(dim=1).flatten()
    away, jumps = away[away.isfinite()], jumps[jumps.isfinite()]
    fractions = e_bfmi(energy)
    figure, (both, chains) = panels(1, 2, size=(3.6, 2.8), width_ratios=[1.5, 1.0])
    edges = _edges(torch.cat([away, jumps]), min(60, max(10, int(math.sqrt(len(away))))))
    both.hist(array(away), edges.tolist(), density=True, color=SKY, alpha=0.55, label="energy less its mean")
    line: dict[str, Any] = {"histtype": "step", "color": BLUE, "linewidth": 1.5, "label": "jump between draws"}
    both.hist(array(jumps), edges.tolist(), density=True, **line)
    both.set(xlabel="nats", yticks=[])
    both.legend(frameon=False, fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, columnspacing=1.0)
    both.spines["left"].set_visible(False)
    low = array(fractions < ENERGY)
    number, value = array(torch.arange(len(fractions), device="cpu")), array(fractions)
    for some, colour in ((~low, BLUE), (low, RED)):
        chains.plot(number[some], value[some], "o", color=colour, markersize=5 if len(value) <= 16 else 3)
    chains.axhline(ENERGY, color=GREY, linestyle="dashed", linewidth=1)
    top = float(fractions.nan_to_num(0.0).clamp(max=1e6).max())
    chains.set(xlabel="chain", ylabel="E-BFMI", ylim=(0.0, 1.12 * max(top, 1.0)), xlim=(-0.6, len(value) - 0.4))
    if len(value) <= 16:
        chains.set_xticks(number)
    for panel in (both, chains):
        plain(panel)
    return figure


def _chosen(q: Draws, names: Sequence[str] | None) -> dict[str, Tensor]:
    """Select up to MOST quantities (C, D) by name, in order."""
    tensors = q.values() if isinstance(q, Samples) else dict(q)
    shapes = {tuple(draws.shape[:2]) for draws in tensors.values()}
    if len(shapes) != 1 or any(draws.dim() < 2 for draws in tensors.values()) or 0 in next(iter(shapes)):
        wanted = "draws (chains, draws, *event) by name, of as many chains and draws each"
        raise ValueError(f"A figure of chains needs Samples or {wanted}. Got the leading shapes {sorted(shapes)}.")
    every = [
        (name, index, f"{name}[{', '.join(map(str, index))}]" if index else name)
        for name, draws in tensors.items()
        for index in product(*map(range, draws.shape[2:]))
    ]
    for wanted in names if names is not None else ():
        if not any(wanted == label or fnmatchcase(name, wanted) for name, _, label in every):
            raise ValueError(f"A figure of chains: {unknown('name', wanted, [*tensors, *(e[2] for e in every[:50])])}")
    if names is not None:
        every = [(n, p, label) for n, p, label in every if any(w == label or fnmatchcase(n, w) for w in names)]
    if not every:
        raise ValueError("A figure of chains needs at least one quantity. Got none: give names.")
    step = math.ceil(len(every) / CANDIDATES) if len(every) > MOST else 1
    candidates = {
        label: tensors[name].movedim((0, 1), (-2, -1))[index].detach().cpu().double()
        for name, index, label in every[::step]
    }
    if len(candidates) <= MOST:
        return candidates
    worst = rhat(torch.stack(list(candidates.values()), -1)).nan_to_num(0.0).argsort(descending=True)[:MOST]
    labels = list(candidates)
    return {labels[index]: candidates[labels[index]] for index in sorted(worst.tolist())}


def _chains(draws: Tensor) -> list[Any]:
    """Return a colour for each chain: distinct colours for few chains, a colour scale for many."""
    count = len(draws)
    if count <= FEW:
        return list(COLOURS[:count])
    scale = gentle("viridis", 0.0, 0.92)
    return [scale(index / (count - 1)) for index in range(count)]


def _trace(panel: "Axes", draws: Tensor) -> None:
    chains, length = draws.shape
    step = math.ceil(length / POINTS)
    number = array(torch.arange(0, length, step, device="cpu"))
    alpha = max(0.25, min(0.85, 6.0 / chains))
    for values, colour in zip(draws, _chains(draws), strict=True):
        panel.plot(number, array(values[::step]), color=colour, linewidth=0.6, alpha=alpha)
    panel.set_xlim(0, max(1, length - 1))
    panel.margins(y=0.08)
    plain(panel)


def _marginals(panel: "Axes", draws: Tensor) -> None:
    finite = draws[draws.isfinite()]
    if not finite.numel():
        panel.set_visible(False)
        return
    edges = _edges(finite, min(40, max(8, int(math.sqrt(draws.shape[1])))))
    alpha = max(0.3, min(0.9, 6.0 / len(draws)))
    for values, colour in zip(draws, _chains(draws), strict=True):
        inside = values[values.isfinite()]
        height = torch.histogram(inside, edges, density=True).hist
        panel.plot(array(height), array(0.5 * (edges[1:] + edges[:-1])), color=colour, alpha=alpha, linewidth=0.9)
    panel.set_xlim(left=0.0)
    panel.set_xticks([])
    panel.tick_params(left=False, labelleft=False)
    panel.spines[["top", "right", "bottom", "left"]].set_visible(False)


def _edges(values: Tensor, bins: int) -> Tensor:
    """Return the edges of bins over the range of the values, which may be a single point."""
    low, high = (float(values.min()), float(values.max())) if values.numel() else (0.0, 1.0)
    if low == high:
        low, high = low - 0.5, high + 0.5
    return torch.linspace(low, high, bins + 1, dtype=torch.float64, device="cpu")


def _rows(draws: Tensor) -> Tensor:
    """Return the chains, or the two halves of a single chain, as its own ranks are uniform by definition."""
    half = draws.shape[1] // 2
    return torch.cat([draws[:, :half], draws[:, -half:]]) if len(draws) == 1 and half else draws


def _rank_counts(draws: Tensor, bins: int) -> Tensor:
    """Count the draws of each chain by the bin of their rank among all draws, (C, bins) in float64."""
    flat = draws.T.flatten()  # draw by draw, so that ties go to all chains in turn
    ranks = torch.empty_like(flat)
    ranks[flat.argsort(stable=True)] = torch.arange(len(flat), dtype=flat.dtype, device=flat.device)
    bin_of = (ranks * bins / len(flat)).long().clamp(max=bins - 1).reshape(draws.T.shape).T
    counts = draws.new_zeros(len(draws), bins)
    return counts.scatter_add_(1, bin_of, torch.ones_like(draws))


def _bars(panel: "Axes", counts: Tensor, expected: float) -> None:
    """Draw a row of bars for each chain, the first on top, all of one scale."""
    unit = 0.85 / float(counts.max())
    for chain, colour in zip(range(len(counts)), _chains(counts), strict=True):
        base = chain + 0.45  # the axis points down
        panel.bar(range(counts.shape[1]), array(-counts[chain] * unit), 0.94, bottom=base, color=colour, alpha=0.75)
        panel.axhline(base - expected * unit, color=BLACK, linewidth=0.8, linestyle="dashed")
    panel.set(xlim=(-0.5, counts.shape[1] - 0.5), ylim=(len(counts) - 0.5, -0.5), yticks=range(len(counts)))
    panel.tick_params(left=False)
    plain(panel)


def _title(panel: "Axes", name: str, draws: Tensor, letters: int) -> None:
    """Set the name with R-hat and ESS as the title, in red where chains disagree, in lines of at most `letters`."""
    ratio, size = float(rhat(draws)), float(bulk_ess(draws))
    numbers = [] if math.isnan(ratio) else [f"R-hat {ratio:.3g}" if ratio > 1.1 else f"R-hat {ratio:.3f}"]
    numbers += [] if math.isnan(size) else [f"ESS {size:,.0f}"]
    short = name if len(name) <= letters else f"...{name[3 - letters :]}"
    gap = "   " if len("   ".join([short, *numbers])) <= letters else "\n"
    text = gap.join([short.replace("$", r"\$"), "   ".join(numbers)]).strip()
    panel.set_title(text, fontsize=9, loc="left", color=RED if ratio > RHAT else BLACK)
    panel.tick_params(labelsize=8)


def _legend(figure: "Figure", colours: list[Any], divergent: bool) -> None:
    from matplotlib.lines import Line2D

    labelled = range(len(colours)) if len(colours) <= FEW else (0, len(colours) - 1)
    lines = [Line2D([], [], color=colours[index], linewidth=1.5, label=f"chain {index}") for index in labelled]
    if len(colours) == 1:
        lines = []
    if divergent:
        lines.append(Line2D([], [], color=RED, marker="|", linestyle="none", markersize=7, label="divergent"))
    if lines:
        figure.legend(handles=lines, loc="outside lower center", ncols=len(lines), frameon=False, fontsize=8)
