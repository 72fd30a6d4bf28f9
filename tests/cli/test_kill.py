"""`posterity fit`, killed with signal 9 at random moments and run again, ends as if nothing had happened.

POSTERITY_KILLS=20 python -m pytest tests/cli/test_kill.py kills twenty runs instead of four.
"""

import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import torch

KILLS = int(os.environ.get("POSTERITY_KILLS", "4"))
SPAWNER = """
    import contextlib, io, json, os, sys
    import posterity.cli.main
    import torch

    torch.set_num_threads(1)
    with contextlib.redirect_stdout(io.StringIO()):  # what this imports no child has to
        assert posterity.cli.main.main(json.loads(sys.stdin.readline())) == 0
    print("ready", flush=True)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            sys.stdout = open(os.devnull, "w")
            os._exit(posterity.cli.main.main(json.loads(line)))
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture
def spawner(tmp_path):
    search = os.pathsep.join(path for path in sys.path if path)
    environment = {**os.environ, "PYTHONPATH": search, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SPAWNER)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        process.stdin.write(words(tmp_path / "warm"))
        process.stdin.flush()
        assert process.stdout.readline() == "ready\n"
        yield process
        process.kill()


def words(folder):
    options = "--hidden 10 --steps 300 --prior-scale 1 --checkpoint-steps 10 --device cpu --quiet"
    return json.dumps(["fit", "two-moons", "--method", "laplace", "--out", str(folder), *options.split()]) + "\n"


@pytest.mark.cpu
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform cannot fork")
@pytest.mark.skipif(torch.cuda.is_available(), reason="a forked process cannot look for CUDA devices again")
def test_killed_runs_end_bit_identical(spawner, content, tmp_path):
    def run(folder, kill_after=None):
        spawner.stdin.write(words(folder))
        spawner.stdin.flush()
        child = int(spawner.stdout.readline())
        if kill_after is not None:
            time.sleep(kill_after)
            with contextlib.suppress(ProcessLookupError):  # it was faster
                os.kill(child, signal.SIGKILL)
        return int(spawner.stdout.readline())

    begin = time.monotonic()
    assert run(tmp_path / "whole") == 0
    seconds = time.monotonic() - begin
    truth = content(tmp_path / "whole")
    moments, parts = random.Random(0), itertools.cycle(range(KILLS))
    killed = tries = 0
    while killed < KILLS:
        tries += 1
        assert tries <= 10 * KILLS  # the kills come before the end
        folder = tmp_path / f"killed-{tries}"
        # Every part of the run has its turn, and a kill comes at random within its part.
        while run(folder, kill_after=seconds * (next(parts) + moments.random()) / KILLS) == -signal.SIGKILL:
            killed += 1
            if moments.random() < 0.5:
                break  # then run it to its end
        assert run(folder) == 0
        assert content(folder) == truth
        shutil.rmtree(folder)
