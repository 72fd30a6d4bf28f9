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


def processor(device: str) -> dict[str, Any]:
    """What tensors on a device are computed by: its name, and the threads of a CPU that take part."""
    import torch

    name = platform.machine() if device == "cpu" else torch.cuda.get_device_name(device)
    return {"device": name, "threads": torch.get_num_threads()}
