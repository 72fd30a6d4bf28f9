"""The figures of the study: accuracy against lambda, pruning, and penalties with the KL to their priors."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from posterity.numerics.layout import Layout
from posterity.penalties import L1, GroupLasso, Penalty, SquaredL2
from posterity.report.canvas import BLACK, BLUE, GREEN, GREY, ORANGE, PINK, RED, SKY, array, panels, plain, save
from posterity_studies.frame import mean_curve, shades
from posterity_studies.penalties.grid import Row, rows_of
from posterity_studies.penalties.runs import HELD_OUT, TRAINING
from posterity_studies.penalties.study import Study

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMULAS = {
    "l2": r"$\|w\|_2^2$",
    "l1": r"$\|w\|_1$",
    "rows": r"$\|w\|_{2,1}$ (incoming)",
    "columns": r"$\|w^T\|_{2,1}$ (outgoing)",
    "channels": r"$\|w^T\|_{2,1}$ (outgoing, whole kernels)",
}
COLOURS = {"l2": BLACK, "l1": GREEN, "rows": BLUE, "columns": ORANGE, "channels": PINK}
SETUP_STYLES: dict[str, tuple[str, Literal["dashed", "solid"]]] = {
    "usual": (GREY, "dashed"),
    "bayesian": (BLUE, "solid"),
}
PAIRS: tuple[tuple[str, Penalty, int], ...] = (
    (r"$r = \mu^2$, $\alpha$ normal", SquaredL2(), 1),
    (r"$r = |\mu|$, $\alpha$ Laplace", L1(), 1),
    (r"$r = \|\mu\|$ of 9 weights, $\alpha$ of group lasso", GroupLasso(), 9),
)
SIGMAS = (0.1, 0.5, 1.0)


def draw(study: Study, folder: Path) -> list[str]:
    """Draw the figures into the folder, and give the names of the files."""
    accuracy(study, folder / "accuracy.png")
    learning(study, folder / "learning.png")
    pairs(folder / "pairs.png")
    names = ["accuracy.png", "learning.png", "pairs.png"]
    if study.tunes_steps:
        step_sizes(study, folder / "step-sizes.png")
        names.append("step-sizes.png")
    if any(result.scores["filters_left"] < 1.0 for result in study.results):
        pruning(study, folder / "pruning.png")
        names.append("pruning.png")
    return names


def accuracy(study: Study, path: Path) -> None:
    """Test accuracy against lambda, a panel for each penalty; red: lambda_Th; dotted: the authors' best."""
    figure, axes = _panel_each(study)
    for axis, part in zip(axes, study.parts, strict=True):
        axis.axvline(1.0, color=RED, linewidth=1.4, zorder=0)
        levels, last = [], 1.0
        for setup in study.settings.setups:
            colour, style = SETUP_STYLES[setup]
            rows = study.rows(part.penalty, setup)
            _curve(axis, [row.relative for row in rows], rows, colour, style)
            last = max([last, *(row.relative for row in rows)])
            levels += [100 * row.scores["accuracy"][0] for row in rows]
            best, printed = study.best(part.penalty, setup), study.published(part.penalty, setup)
            if printed is not None:
                axis.axhline(printed.best, color=colour, linestyle="dotted", linewidth=1.2, zorder=0)
                levels.append(printed.best)
            if best is not None:
                panel = ([best.relative], [100 * best.scores["accuracy"][0]])
                axis.plot(*panel, "*", color=colour, markersize=13, markeredgecolor="white", zorder=5)
        axis.set_xscale("log")
        usual = " (usual: of equal first penalty)" if "usual" in study.settings.setups else ""
        axis.set_xlabel(rf"$\lambda / \lambda_{{Th}}${usual}", fontsize=9)
        if levels:
            low, high = _frame(levels)
            axis.set_ylim(low, high)
            _told_below(axis, study.at_theory(part.penalty, "bayesian"), low, last > 1.0)
        plain(axis)
    axes[0].set_ylabel("test accuracy, %", fontsize=10)
    _legend_of_setups(study, axes[0])
    figure.suptitle(_title(study), fontsize=11)
    save(figure, path)


def learning(study: Study, path: Path) -> None:
    """Accuracies on held-out and on training rows against passes over the rows, at lambda* and at lambda_Th."""
    from matplotlib.lines import Line2D

    figure, axes = _panel_each(study, sharey=True)
    levels = []
    labels: dict[str, str] = {}  # by colour
    for axis, part in zip(axes, study.parts, strict=True):
        for setup in study.settings.setups:
            for place, row in (("*", study.best(part.penalty, setup)), ("Th", study.at_theory(part.penalty, setup))):
                if row is None:
                    continue
                colour = RED if place == "Th" else SETUP_STYLES[setup][0]
                labels[colour] = rf"{setup} $\lambda_l$, $\lambda{'^*' if place == '*' else '_{Th}'}$"
                for fit in study.fits(row):
                    for name, style in ((HELD_OUT, "solid"), (TRAINING, "dotted")):
                        points = fit.curves.get(name, [])
                        passes = [fit.cell.epochs * step / points[-1][0] for step, _ in points]
                        values = [100 * value for _, value in points]
                        axis.plot(passes, values, color=colour, linestyle=style, linewidth=1.5)
                        levels += values
        axis.set_xlabel("epochs", fontsize=10)
        plain(axis)
    if levels:
        axes[0].set_ylim(max(0.0, sorted(levels)[len(levels) // 10] - 2.0), min(100.5, max(levels) + 2.0))
    axes[0].set_ylabel("accuracy, %", fontsize=10)
    entries = [Line2D([], [], color=colour, label=label) for colour, label in labels.items()]
    entries += [
        Line2D([], [], color=BLACK, label="held-out rows"),
        Line2D([], [], color=BLACK, linestyle="dotted", label="training rows"),
    ]
    figure.legend(handles=entries, frameon=False, fontsize=9, loc="outside lower center", ncols=len(entries))
    figure.suptitle(_title(study), fontsize=11)
    save(figure, path)


def step_sizes(study: Study, path: Path) -> None:
    """Accuracy on held-out rows against lambda, a line for each step size; dashed: with the usual layer factors."""
    from matplotlib.lines import Line2D

    figure, axes = _panel_each(study)
    fits = study.search or study.results
    steps = study.settings.actual_step_sizes
    colours = dict(zip(steps, shades(len(steps)), strict=True))
    for axis, part in zip(axes, study.parts, strict=True):
        axis.axvline(1.0, color=RED, linewidth=1.4, zorder=0)
        levels = []
        for setup in study.settings.setups:
            for step_size, colour in colours.items():
                own = [fit for fit in fits if fit.cell.step_size == step_size]
                rows = rows_of(own, part.penalty, setup, part.exchange, study.num_data)
                values = [100 * row.scores["held_out_accuracy"][0] for row in rows]
                style = SETUP_STYLES[setup][1]
                axis.plot(
                    [row.relative for row in rows], values, color=colour, linestyle=style, marker="o", markersize=3.5
                )
                levels += values
        axis.set_xscale("log")
        axis.set_xlabel(r"$\lambda / \lambda_{Th}$", fontsize=10)
        if levels:
            axis.set_ylim(*_frame(levels))
        plain(axis)
    axes[0].set_ylabel("held-out accuracy, %", fontsize=10)
    entries = [Line2D([], [], color=colour, label=f"step size {step_size:g}") for step_size, colour in colours.items()]
    entries += [
        Line2D([], [], color=GREY, linestyle=SETUP_STYLES[setup][1], label=rf"{setup} $\lambda_l$")
        for setup in study.settings.setups
    ]
    entries.append(Line2D([], [], color=RED, linewidth=1.4, label=r"$\lambda_{Th} = 1/n$"))
    figure.legend(handles=entries, frameon=False, fontsize=9, loc="outside lower center", ncols=len(entries))
    figure.suptitle(_title(study, study.settings.search_epochs), fontsize=11)
    save(figure, path)


def _panel_each(study: Study, **options: Any) -> tuple["Figure", list["Axes"]]:
    """Return a panel for each penalty, with its formula above."""
    count = len(study.parts)
    columns = min(count, 4)
    figure, axes = panels(-(-count // columns), columns, size=(3.4, 3.0), **options)
    for axis in axes[count:]:
        axis.set_axis_off()
    for axis, part in zip(axes, study.parts, strict=False):
        axis.set_title(FORMULAS[part.penalty], fontsize=11)
    return figure, list(axes[:count])


def pruning(study: Study, path: Path) -> None:
    """Draw test accuracy against the remaining filters and weights; of fits that kept all filters only the best."""
    from matplotlib.ticker import NullFormatter

    figure, axes = panels(1, 2, size=(4.6, 3.4), sharey=True)
    levels, smallest = [], [50.0]
    for part in study.parts:
        for setup in study.settings.setups:
            rows, style = _pruned(study.rows(part.penalty, setup)), SETUP_STYLES[setup][1]
            levels += [100 * row.scores["accuracy"][0] for row in rows]
            smallest += [100 * row.scores["weights_left"][0] for row in rows]
            for axis, key in zip(axes, ("filters_left", "weights_left"), strict=True):
                where = [100 * row.scores[key][0] for row in rows]
                _curve(axis, where, rows, COLOURS[part.penalty], style)
    for axis, name in zip(axes, ("filters left, %", "weights of the smaller network, %"), strict=True):
        axis.set_xlabel(name, fontsize=10)
        plain(axis)
    axes[0].set_xlim(103, -3)
    axes[1].set_xscale("log")
    axes[1].set_xlim(115, 0.8 * min(smallest))
    axes[1].xaxis.set_major_formatter("{x:g}")
    axes[1].xaxis.set_minor_formatter(NullFormatter())
    if levels:
        axes[0].set_ylim(*_frame(levels))
    axes[0].set_ylabel("test accuracy, %", fontsize=10)
    _legend_of_penalties(study, axes[0])
    figure.suptitle(_title(study), fontsize=11)
    save(figure, path)


def pairs(path: Path) -> None:
    """Penalties r, and KL(N(mu, sigma^2) || alpha) less that at mu = 0, of the prior alpha = exp(-r) / Z."""
    figure, axes = panels(1, len(PAIRS), size=(3.7, 3.0))
    lengths = torch.linspace(-3.0, 3.0, 121, dtype=torch.float64, device="cpu")
    for axis, (title, penalty, size) in zip(axes, PAIRS, strict=True):
        prior = penalty.prior().bound(Layout.of({"weight": (1, size)}))
        means = (lengths / size**0.5).unsqueeze(1).expand(-1, size)  # along the diagonal
        for sigma, colour in zip(SIGMAS, (SKY, BLUE, GREEN), strict=True):
            scale = torch.full_like(means, sigma)
            at_zero = prior.cross_entropy(torch.zeros_like(means[:1]), scale[:1])
            divergence = prior.cross_entropy(means, scale) - at_zero
            axis.plot(array(lengths), array(divergence), color=colour, label=rf"KL, $\sigma$ = {sigma:g}")
        values = torch.stack([penalty(mean.unsqueeze(0)) for mean in means])
        axis.plot(array(lengths), array(values), color=BLACK, linestyle="dotted", linewidth=1.8, label=r"$r(\mu)$")
        axis.set_title(title, fontsize=10)
        axis.set_xlabel(r"$\mu$" if size == 1 else r"$\pm\|\mu\|$", fontsize=10)
        plain(axis)
    axes[0].set_ylabel(r"$r(\mu)$, KL($\mu$) $-$ KL(0), nats", fontsize=10)
    axes[0].legend(frameon=False, fontsize=8.5, loc="upper center")
    save(figure, path)


def _curve(axis: "Axes", where: list[float], rows: list[Row], colour: str, style: str) -> None:
    scores = [(100 * mean, 100 * (spread or 0.0)) for mean, spread in (row.scores["accuracy"] for row in rows)]
    mean_curve(axis, where, scores, 0.15, color=colour, linestyle=style, linewidth=1.6, markersize=3.5)


def _told_below(axis: "Axes", theory: Row | None, low: float, right: bool) -> None:
    """Write the accuracy at lambda_Th as a number if it lies below the panel."""
    if theory is None or 100 * theory.scores["accuracy"][0] >= low:
        return
    words, panel = f"{100 * theory.scores['accuracy'][0]:.1f} ↓", (4 if right else -4, 4)
    side: Literal["left", "right"] = "left" if right else "right"
    axis.annotate(words, (1.0, low), panel, textcoords="offset points", ha=side, fontsize=8.5, color=RED)


def _pruned(rows: list[Row]) -> list[Row]:
    """Return the row with the best held-out accuracy among those that kept all filters, then those that lost some."""
    unpruned = [row for row in rows if row.scores["filters_left"][0] == 1.0]
    best = max(unpruned, key=lambda row: row.scores["held_out_accuracy"][0], default=None)
    return [row for row in rows if row is best or row not in unpruned]


def _frame(levels: list[float]) -> tuple[float, float]:
    """Set limits that show differences among good fits; fits far below are cut off."""
    high, middle = max(levels), sorted(levels)[len(levels) // 2]
    low = max(min(levels), high - 6 * max(high - middle, 0.5))
    room = 0.08 * (high - low) + 0.05
    return low - room, high + room


def _legend_of_setups(study: Study, axis: "Axes") -> None:
    from matplotlib.lines import Line2D

    styles = {setup: SETUP_STYLES[setup] for setup in study.settings.setups}
    entries = [
        Line2D([], [], color=colour, linestyle=style, marker="o", markersize=3.5, label=f"{setup} $\\lambda_l$")
        for setup, (colour, style) in styles.items()
    ]
    entries.append(
        Line2D([], [], color=GREY, marker="*", markersize=11, linestyle="none", label=r"$\lambda^*$, held out")
    )
    entries.append(Line2D([], [], color=RED, linewidth=1.4, label=r"$\lambda_{Th} = 1/n$"))
    if any(study.published(part.penalty, setup) for part in study.parts for setup in styles):
        entries.append(Line2D([], [], color=GREY, linestyle="dotted", linewidth=1.2, label=r"published, $\lambda^*$"))
    axis.figure.legend(handles=entries, frameon=False, fontsize=9, loc="outside lower center", ncols=len(entries))


def _legend_of_penalties(study: Study, axis: "Axes") -> None:
    from matplotlib.lines import Line2D

    names = [part.penalty for part in study.parts]
    entries = [Line2D([], [], color=COLOURS[name], linewidth=1.8, label=FORMULAS[name]) for name in names]
    if len(study.settings.setups) > 1:
        setups = study.settings.setups
        entries += [Line2D([], [], color=GREY, linestyle=SETUP_STYLES[setup][1], label=setup) for setup in setups]
    axis.figure.legend(handles=entries, frameon=False, fontsize=9, loc="outside lower center", ncols=len(entries))


def _title(study: Study, search_epochs: int | None = None) -> str:
    settings, seeds = study.settings, 1 if search_epochs else study.settings.seeds
    over = f"mean and standard deviation over {seeds} seeds" if seeds > 1 else "one seed"
    norm = "" if settings.batch_norm else " without batch norm"
    steps = f", step size {settings.step_size[0]:g}" if len(settings.step_size) == 1 else ""
    epochs = search_epochs or settings.actual_epochs
    name = f"{settings.data.replace('mnist', 'MNIST').replace('cifar', 'CIFAR')}, {settings.architecture.label}{norm}"
    return f"{name}, n = {study.num_data:,}{steps}, {epochs} epoch{'s' * (epochs > 1)}: {over}"
