"""What a computation ran on, for those who read its results."""

import os
import platform
from pathlib import Path
from typing import Any


def machine() -> dict[str, Any]:
    """Model name of the processor and number of cores; nothing that tells one computer from another of its kind."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {"cpu": names[0] if names else platform.processor() or platform.machine(), "cores": os.cpu_count()}
