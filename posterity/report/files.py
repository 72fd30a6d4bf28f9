"""Files written whole or not at all."""

import os
from importlib.util import find_spec
from pathlib import Path

from posterity.errors import PosterityError, unknown
from posterity.storage import disk

FORMATS = ("png", "pdf", "svg")


def write_file(path: Path, data: bytes) -> None:
    """Write `data` to `path`, making its folder where needed; a reader sees the old file or the new, never half."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = disk.temporary(path.parent)
        try:
            disk.write(draft, [data])
            os.replace(draft, path)
        finally:
            disk.remove(draft)
    except OSError as error:
        raise PosterityError(f"Cannot write '{path}': {error.strerror or error}. Give another path.") from error


def check_figure_path(path: Path) -> None:
    """Refuse a figure that could not be drawn in the end: no matplotlib, or a file name of an unknown format."""
    _check_matplotlib()
    suffix = path.suffix.lower().removeprefix(".")
    if suffix not in FORMATS:
        raise ValueError(
            f"A figure must be a .png, .pdf or .svg file. Got '{path}'. {unknown('format', suffix, FORMATS)}"
            if suffix
            else f"A figure must be a .png, .pdf or .svg file. Got '{path}'. Add .png to its name."
        )
    if path.is_dir():
        raise ValueError(f"A figure must be a file. Got the folder '{path}'. Give a file name in it.")


def check_report_path(path: Path) -> None:
    """Refuse a report that could not be written in the end: no matplotlib for its figures, or no HTML file."""
    _check_matplotlib()
    if path.suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"A report must be an .html file. Got '{path}'. Give a name that ends in .html.")
    if path.is_dir():
        raise ValueError(f"A report must be a file. Got the folder '{path}'. Give a file name in it.")


def _check_matplotlib() -> None:
    if find_spec("matplotlib") is None:
        raise PosterityError("Figures need matplotlib. Install it with: pip install 'posterity[report]'.")
