"""A writer killed at any instant leaves the old content or the new."""

import os
import random
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import torch

from posterity.storage import Part, RunFolder

pytestmark = pytest.mark.cpu  # files hold tensors of the CPU

NUMBERS = 125_000  # 1 MB of float64 in two parts
WRITER = f"""
    import os, sys
    import torch
    from posterity.storage import Part, RunFolder

    torch.set_num_threads(1)

    def parts(value):
        tensors = {{"x": torch.full(({NUMBERS},), float(value), dtype=torch.float64)}}
        return {{"posterior": Part({{"value": value}}, tensors), "trace": Part({{"value": value}}, tensors)}}

    contents = [parts(0), parts(1)]
    run, parent = RunFolder(sys.argv[1]), os.getpid()
    print("ready", flush=True)
    for _ in sys.stdin:  # one writer for each line: torch is imported once
        child = os.fork()
        if child == 0:
            while os.getppid() == parent:
                for content in contents:
                    run.commit(content)
            os._exit(0)
        print(child, flush=True)
        os.waitpid(child, 0)
        print("dead", flush=True)
"""


def parts(value):
    tensors = {"x": torch.full((NUMBERS,), float(value), dtype=torch.float64)}
    return {"posterior": Part({"value": value}, tensors), "trace": Part({"value": value}, tensors)}


@pytest.fixture
def spawner(tmp_path):
    command = [sys.executable, "-c", textwrap.dedent(WRITER), str(tmp_path / "run")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout.readline() == "ready\n"
        yield process
        process.kill()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform cannot fork")
def test_fifty_kills(tmp_path, spawner):
    run = RunFolder(tmp_path / "run")
    run.commit(parts(0))
    delays = random.Random(0)
    seen, dirty = set(), 0
    for round_number in range(50):
        spawner.stdin.write("go\n")
        spawner.stdin.flush()
        writer = int(spawner.stdout.readline())
        time.sleep(delays.uniform(0.0, 0.06))
        os.kill(writer, signal.SIGKILL)
        assert spawner.stdout.readline() == "dead\n"

        values = {run.read(name).config["value"] for name in run.parts()}
        assert len(values) == 1  # never a mix
        value = values.pop()
        assert run.parts() == ("posterior", "trace")
        for name in run.parts():
            assert torch.equal(run.read(name).tensors["x"], parts(value)[name].tensors["x"])
        seen.add(value)

        dirty += len(os.listdir(run.path)) > 4
        if round_number % 2:  # leftovers may also pile up
            run.commit(parts(round_number // 2 % 2))
            assert len(os.listdir(run.path)) == 4  # manifest, lock, two parts
    assert seen == {0, 1}
    assert dirty > 0  # some kills did hit a commit under way
