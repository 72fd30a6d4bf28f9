"""Peak memory of a call, on calls whose use is known."""

from pathlib import Path

import pytest
import torch
from benchmarkfiles import load

SIZE = 64 * 2**20  # bytes: far above what an allocator keeps for itself

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc"),
]

memory = load("memory")


def allocate(times: int) -> None:
    """That many blocks of SIZE, each freed before the next."""
    for _ in range(times):
        torch.ones(SIZE, dtype=torch.uint8)


def peak(times: int) -> int:
    """The least of three looks: whatever else this process allocates meanwhile only adds."""
    return min(memory.peak_bytes(lambda: allocate(times)) for _ in range(3))


def test_sees_the_peak_and_not_what_is_left_or_the_sum():
    assert 0.9 * SIZE < peak(3) < 1.5 * SIZE


def test_an_earlier_peak_does_not_count():
    allocate(1)
    assert memory.peak_bytes(lambda: None) < 0.2 * SIZE


def test_what_was_there_before_does_not_count():
    held = torch.ones(SIZE, dtype=torch.uint8)
    assert peak(1) < 1.5 * SIZE
    assert held.numel() == SIZE


def test_blocks_held_together_add_up():
    found = memory.peak_bytes(lambda: [torch.ones(SIZE, dtype=torch.uint8) for _ in range(3)])
    assert 2.8 * SIZE < found < 3.6 * SIZE
