"""Is this checkout slower than another one? Two processes, one a checkout, take turns at the same calls.

    python -m benchmarks.releases PATH_OF_THE_OTHER_CHECKOUT

Only names that both checkouts have are used. Each process holds its problems ready and times one call when asked, so
that other load on the machine hits both alike. A ratio above 1 means that this checkout is slower.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

import posterity as po

ROWS, WIDTH, STEPS, PREDICTED = 5_000, 400, 40, 500


def calls() -> dict[str, Callable[[], object]]:
    """The calls to time, by name: steps through `infer`, and predictions of Laplace posteriors."""
    torch.manual_seed(0)
    x = torch.randn(ROWS, 784)
    y = (x @ torch.randn(784, 10)).argmax(1)
    net = po.networks.MLP((784, WIDTH, WIDTH, 10))
    joint = po.Joint(net, po.likelihoods.Categorical(), po.priors.Normal(1.0), num_data=ROWS)
    small = po.Joint(po.networks.MLP((784, 50, 10)), po.likelihoods.Categorical(), po.priors.Normal(1.0), num_data=500)
    kronecker = po.curvature.Kronecker()
    laplace, _ = po.infer(
        po.methods.Laplace(structure=kronecker, tuning=None), small, (x[:500], y[:500]), progress=False
    )
    last = po.methods.Laplace(subset=po.methods.LastLayer(), structure=kronecker, tuning=None)
    head, _ = po.infer(last, small, (x[:500], y[:500]), progress=False)
    tiny = po.Joint(
        po.networks.MLP((2, 50, 50, 10)), po.likelihoods.Categorical(), po.priors.Normal(1.0), num_data=ROWS
    )
    probit = po.predictive.Probit()

    def steps(kind: Callable[..., object], problem: object = joint, columns: int = 784) -> Callable[[], object]:
        method = kind(steps=STEPS, batch_size=128, optimizer=po.optim.Adam())
        rows = x[:, :columns].contiguous()
        return lambda: po.infer(method, problem, (rows, y), progress=False)  # type: ignore[arg-type]

    return {
        "map_step": steps(po.methods.MAP),
        "mean_field_step": steps(po.methods.MeanField),
        "map_step, 2-50-50-10": steps(po.methods.MAP, tiny, 2),
        "mean_field_step, 2-50-50-10": steps(po.methods.MeanField, tiny, 2),
        "laplace_predict, all weights": lambda: laplace.predict(x[:PREDICTED], integrator=probit),
        "laplace_predict, last layer": lambda: head.predict(x[:PREDICTED], integrator=probit),
    }


def work() -> None:
    """Time the calls that standard input names, and print the seconds of each."""
    torch.set_num_threads(1)
    ready = calls()
    for call in ready.values():
        call()
    print("ready", flush=True)
    for line in sys.stdin:
        begin = time.perf_counter()
        ready[line.strip()]()
        print(time.perf_counter() - begin, flush=True)


def worker(checkout: Path) -> "subprocess.Popen[str]":
    """A process that works with the package of a checkout."""
    environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__).resolve()), "--work"]
    return subprocess.Popen(
        command, cwd=checkout, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def main() -> None:
    """Let both checkouts take turns, and print the ratios."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    options.add_argument("other", type=Path, nargs="?", help="the root of the other checkout")
    options.add_argument("--rounds", type=int, default=15)
    options.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.work:
        work()
        return
    here = worker(Path(__file__).resolve().parent.parent)
    there = worker(given.other.resolve())
    for process in (here, there):
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "ready"

    def seconds(process: "subprocess.Popen[str]", name: str) -> float:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(name + "\n")
        process.stdin.flush()
        return float(process.stdout.readline())

    print("| call | here, ms | there, ms | ratio of medians | median ratio by round |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for name in calls():
        pairs = []
        for turn in range(given.rounds):
            order = (here, there) if turn % 2 else (there, here)
            taken = {id(process): seconds(process, name) for process in order}
            pairs.append((taken[id(here)], taken[id(there)]))
        units = STEPS if "step" in name else 1
        own, other = (1e3 * statistics.median(column) / units for column in zip(*pairs, strict=True))
        by_round = statistics.median(first / second for first, second in pairs)
        print(f"| {name} | {own:.3f} | {other:.3f} | {own / other:.3f} | {by_round:.3f} |")
    for process in (here, there):
        process.terminate()


if __name__ == "__main__":
    main()
