"""Fits on a Ray cluster: the bits of processes, and what a task costs beside its work.

    python -m benchmarks.ray

On a local cluster of two nodes with a CPU each (`ray.cluster_utils.Cluster`) and in two processes: an ensemble of 20
members, `posterity study uci` on two data sets at a small size, and `auto`. Where the results differ, the command ends
with 1. The overhead is the time of tasks that do nothing: the wall time of 500 of them over their number, once as the
first work of a connected process (workers start and import torch) and, the median of `--rounds` times, after that.
"""

import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.harness import context, parser, write
from benchmarks.kills import two_nodes
from posterity.estimators import automatic as estimators
from posterity.estimators.automatic import fit_automatic
from posterity.inference import Executor, Processes, Ray
from posterity.likelihoods import Gaussian
from posterity.methods import MAP, Ensemble
from posterity.model import Joint
from posterity.model.module import seeded
from posterity.networks import MLP
from posterity.numerics.random import Key
from posterity.priors import Normal
from posterity_studies.uci.settings import Settings
from posterity_studies.uci.study import run

TASKS, MEMBERS, MOST = 500, 20, 0.05  # seconds that a task may cost beside its work
STUDY = Settings(("energy", "bostonHousing"), ("map", "laplace"), steps=300, splits=2, jobs=2)
EXECUTORS: dict[str, Executor] = {"ray": Ray(threads=1), "processes": Processes(2, threads=1)}
Rows = tuple[torch.Tensor, torch.Tensor]


def nothing() -> None:
    """Do nothing."""


def per_task(executor: Executor) -> float:
    """Seconds a task of many that do nothing."""
    begin = time.perf_counter()
    count = sum(1 for _ in executor.each({str(number): nothing for number in range(TASKS)}))
    return (time.perf_counter() - begin) / count


def ensemble(executor: Executor, rows: Rows, seed: int) -> list[list[float]]:
    """The weights of the members."""
    with seeded(seed):
        module = MLP([rows[0].shape[1], 20, 1])
    joint = Joint(module, Gaussian(0.1), Normal(), num_data=len(rows[0]))
    tasks = Ensemble(MAP(steps=500, batch_size=64), MEMBERS).tasks(joint, rows, seed=seed)
    return [outcome.posterior.point().tolist() for outcome in executor.run(tasks) if outcome.posterior is not None]


def study(word: str, seed: int) -> dict[str, Any]:
    """The scores of every cell."""
    with tempfile.TemporaryDirectory() as folder:
        results = run(replace(STUDY, executor=word, seed=seed), Path(folder)).results
    return {str(result.cell): result.scores for result in results}


def automatic(executor: Executor, rows: Rows, seed: int) -> dict[str, Any]:
    """What is stored of `auto`, as JSON and numbers."""
    with mock.patch.object(estimators, "RUNAWAY", math.inf):  # a loaded machine tries no fewer candidates
        model = fit_automatic(*rows, "regression", seconds=10.0, seed=seed, executor=executor)
    return {
        name: [json.loads(json.dumps(part.config)), {key: value.tolist() for key, value in part.tensors.items()}]
        for name, part in model.parts().items()
    }


def main() -> int:
    """Compare and measure; returns 1 where results differ or a task costs too much."""
    options = parser(__doc__ or "").parse_args()
    torch.set_num_threads(options.threads)
    key, seed = Key(options.seed), options.seed
    inputs = key.fold("inputs").normal((300, 4), torch.float32)
    rows = inputs, inputs[:, :1].sin() + 0.1 * key.fold("noise").normal((300, 1), torch.float32)
    work: dict[str, Callable[[str], Any]] = {
        f"ensemble of {MEMBERS}": lambda where: ensemble(EXECUTORS[where], rows, seed),
        "study uci": lambda where: study(where, seed),
        "auto": lambda where: automatic(EXECUTORS[where], rows, seed),
    }
    facts: dict[str, Any] = {}
    table: list[tuple[str, ...]] = [("work", "same bits", "seconds on Ray", "seconds in processes")]
    with two_nodes():
        first, later = per_task(EXECUTORS["ray"]), [per_task(EXECUTORS["ray"]) for _ in range(options.rounds)]
        for name, results in work.items():
            found, seconds = {}, {}
            for where in EXECUTORS:
                begin = time.perf_counter()
                found[where] = results(where)
                seconds[where] = round(time.perf_counter() - begin, 1)
            facts[name] = {"same": found["ray"] == found["processes"], "seconds": seconds}
            table.append((name, "yes" if facts[name]["same"] else "NO", *map(str, seconds.values())))
            print(*table[-1], flush=True)
    cost = statistics.median(later)
    notes = [
        f"A task that does nothing takes {1e3 * cost:.1f} ms, the median of {options.rounds} times {TASKS} (at most "
        f"{1e3 * MOST:g} allowed); {1e3 * first:.1f} ms in the first {TASKS} of a process, as workers start."
    ]
    facts["seconds_a_task"] = {"first": first, "later": cost, "rounds": later}
    write("ray", [], context(options, ["ray"]), facts, notes, options.results, table)
    return int(max(first, cost) > MOST or any(not facts[name]["same"] for name in work))


if __name__ == "__main__":
    sys.exit(main())
