"""Peak memory of a call, on calls whose use is known."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarkfiles import ROOT

SIZE = 64 * 2**20  # bytes: far above what an allocator keeps for itself

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc"),
]

SCRIPT = """
import json
import torch
from benchmarks.memory import peak_bytes

def block():
    return torch.ones({size}, dtype=torch.uint8)

def in_turn(times):
    for _ in range(times):
        block()

in_turn(1)
peaks = {{
    "nothing": peak_bytes(lambda: None),  # after an earlier peak
    "in turn": peak_bytes(lambda: in_turn(3)),
    "together": peak_bytes(lambda: [block() for _ in range(3)]),
}}
held = block()
peaks["beside another"] = peak_bytes(lambda: in_turn(1))
print(json.dumps(peaks))
"""


@pytest.fixture(scope="module")
def peaks():
    """Peaks in a process of their own: other tests leave heaps from which blocks may be taken."""
    script = [sys.executable, "-c", SCRIPT.format(size=SIZE)]
    return json.loads(subprocess.run(script, cwd=ROOT, capture_output=True, text=True, check=True).stdout)


def test_sees_the_peak_and_not_what_is_left_or_the_sum(peaks):
    assert 0.9 * SIZE < peaks["in turn"] < 1.5 * SIZE


def test_an_earlier_peak_does_not_count(peaks):
    assert peaks["nothing"] < 0.2 * SIZE


def test_what_was_there_before_does_not_count(peaks):
    assert 0.9 * SIZE < peaks["beside another"] < 1.5 * SIZE


def test_blocks_held_together_add_up(peaks):
    assert 2.8 * SIZE < peaks["together"] < 3.6 * SIZE
