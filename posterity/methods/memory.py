"""Whether something fits the machine, before it is tried: a process that runs out of memory dies without a word."""

import os

import torch


def device_memory(device: torch.device) -> int | None:
    """Bytes of memory that the device has in all; None where that cannot be told."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not a POSIX system
        return None


def refuse_too_large(what: str, needed: int, device: torch.device, remedy: str) -> None:
    """Raise a ValueError if `what` takes more bytes than the device has."""
    there = device_memory(device)
    if there is not None and needed > there:
        raise ValueError(f"{what} needs about {needed / 1e9:.3g} GB, and {device} has {there / 1e9:.3g} GB. {remedy}")
