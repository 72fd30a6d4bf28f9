"""Shared parts of figures: a grid of panels without pyplot's global state, colours, and files."""

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from posterity.errors import PosterityError
from posterity.storage.disk import write_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

# Okabe and Ito's colours, which people with any colour vision tell apart; pages have them too (page.css).
BLACK, ORANGE, SKY, GREEN, BLUE, RED, PINK = "#1f2733", "#e69f00", "#56b4e9", "#009e73", "#0072b2", "#d55e00", "#cc79a7"
GREY = "#8a8a8a"
SOFT, EDGE = "#566070", "#9aa4b1"  # of axes and their numbers


def panels(
    rows: int,
    columns: int,
    *,
    size: tuple[float, float],
    beside: tuple[float, float] = (0.0, 0.0),
    layout: Literal["constrained", "compressed"] = "constrained",
    **options: Any,
) -> tuple["Figure", list["Axes"]]:
    """A figure of rows x columns panels, each `size` (width, height) inches, with `beside` more inches around them.

    Options go to `Figure.subplots`.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PosterityError("Figures need matplotlib. Install it with: pip install 'posterity[report]'.") from error
    inches = (size[0] * columns + beside[0], size[1] * rows + beside[1])
    figure = Figure(figsize=inches, dpi=150, layout=layout)
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(rows, columns, squeeze=False, **options).flat)
    for panel in axes:
        panel.tick_params(labelsize=9, color=EDGE, labelcolor=SOFT)
        panel.spines[:].set_color(EDGE)
        for text in (panel.title, panel.xaxis.label, panel.yaxis.label):
            text.set_color(BLACK)
    return figure, axes


def plain(panel: "Axes") -> None:
    """Hide the upper and right edges of a panel."""
    panel.spines[["top", "right"]].set_visible(False)


def gentle(name: str, low: float, high: float) -> "Colormap":
    """Return the part of a named colour map between `low` and `high`, without ends on which points cannot be seen."""
    from matplotlib import colormaps
    from matplotlib.colors import LinearSegmentedColormap

    shades = colormaps[name](torch.linspace(low, high, 256, device="cpu").numpy())
    return LinearSegmentedColormap.from_list(f"gentle {name}", shades)


def save(
    figure: "Figure",
    path: Path,
    margin: float = 0.12,
    *,
    legend_of: "Axes | None" = None,
    ncols: int | None = None,
    fontsize: int = 10,
) -> None:
    """Write the figure atomically, in the format of the path's suffix (.png, .pdf, .svg).

    The legend of the panel `legend_of` stands below the figure, in `ncols` columns (None: in one row).
    """
    if legend_of is not None:
        handles, labels = legend_of.get_legend_handles_labels()
        ncols = ncols or len(labels)
        figure.legend(handles, labels, loc="outside lower center", ncols=ncols, frameon=False, fontsize=fontsize)
    buffer = io.BytesIO()
    figure.savefig(buffer, format=path.suffix.lower().removeprefix("."), bbox_inches="tight", pad_inches=margin)
    write_file(path, buffer.getvalue())


def array(values: Tensor) -> "NDArray[Any]":
    """The numbers of a tensor for matplotlib."""
    return values.detach().cpu().numpy()
