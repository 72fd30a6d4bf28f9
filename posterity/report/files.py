"""Checks of the files of a report, and facts about the machine."""

import os
import platform
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from posterity.errors import PosterityError, unknown

FORMATS = ("png", "pdf", "svg")


def check_figure_path(path: Path) -> None:
    """Raise early for a figure that could not be written: matplotlib is missing, or the suffix is unknown."""
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
    """Raise early for a report that could not be written: its path must be an HTML file."""
    if path.suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"A report must be an .html file. Got '{path}'. Give a name that ends in .html.")
    if path.is_dir():
        raise ValueError(f"A report must be a file. Got the folder '{path}'. Give a file name in it.")


def _check_matplotlib() -> None:
    if find_spec("matplotlib") is None:
        raise PosterityError("Figures need matplotlib. Install it with: pip install 'posterity[report]'.")


def machine() -> dict[str, Any]:
    """Return the model name and the cores of the CPU; nothing that identifies a single computer."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {"cpu": names[0] if names else platform.processor() or platform.machine(), "cores": os.cpu_count()}


def processor(device: str) -> dict[str, Any]:
    """Return the name of a device, and for a CPU the number of threads."""
    import torch

    name = platform.machine() if device == "cpu" else torch.cuda.get_device_name(device)
    return {"device": name, "threads": torch.get_num_threads()}
