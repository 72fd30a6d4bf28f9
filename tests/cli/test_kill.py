"""`posterity fit`, killed with signal 9 at random moments and run again, ends as if nothing had happened.

POSTERITY_KILLS=20 python -m pytest tests/cli/test_kill.py kills twenty runs, not four; `python -m benchmarks.kills`
kills more methods, a study, and workers and nodes of Ray.
"""

import os
from functools import partial

import pytest
import torch
from benchmarkfiles import load

KILLS = int(os.environ.get("POSTERITY_KILLS", "4"))


@pytest.mark.cpu
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform cannot fork")
@pytest.mark.skipif(torch.cuda.is_available(), reason="a forked process cannot look for CUDA devices again")
def test_killed_runs_end_bit_identical(tmp_path):
    kills = load("kills")
    tally = kills.killed_commands(partial(kills.fit_words, "laplace"), KILLS, tmp_path)
    assert (tally.kills, tally.differ) == (KILLS, 0)
    assert tally.folders >= 1
