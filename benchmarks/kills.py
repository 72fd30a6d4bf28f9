"""Runs that are killed with signal 9 at random moments end with the bits of the undisturbed run.

    python -m benchmarks.kills                     all cases, about half an hour
    python -m benchmarks.kills --cases nuts,ray-node --kills 3

The cases are `posterity fit` by MAP, mean field, NUTS and an ensemble (40 kills each), `posterity study uci` (20), and
tasks on a Ray cluster of two nodes on this machine, of which workers and nodes are killed (10 each). A killed command
is given again, killed again or run to its end; on Ray the executor itself begins the work again. What counts is the
content of the folder at the end, file by file: for the study its scores, since its files also hold seconds and a date.
"""

import contextlib
import hashlib
import itertools
import json
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import context, parser, write

FITS = "--prior-scale 1 --checkpoint-steps 10 --device cpu --quiet"
METHODS = {
    "map": "--steps 300 --hidden 10",
    "mean-field": "--steps 300 --hidden 10",
    "nuts": "--draws 30 --warmup 30 --chains 2 --hidden 3",
    "ensemble": "--steps 300 --hidden 10",
    "laplace": "--steps 300 --hidden 10",
}
STUDY = "study uci --datasets energy --methods map,laplace --splits 4 --steps 300 --jobs 1 --quiet"
TASKS = 6  # on a Ray cluster at a time
TASK = b"ray::begin"  # a worker at work: agents of nodes begin with ray::, too
TRIES = 10  # times as many runs as kills, after which the kills never came in time
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


@dataclass(frozen=True)
class Tally:
    """How many kills came in time, how many folders were compared at the end, and how many of these differed."""

    kills: int
    folders: int
    differ: int


class Spawner:
    """A process that has imported the command line, and forks a child for each command; `warm` is a first one."""

    def __init__(self, warm: list[str]) -> None:
        search = os.pathsep.join(path for path in sys.path if path)
        environment = {**os.environ, "PYTHONPATH": search, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", textwrap.dedent(SPAWNER)]
        pipe = subprocess.PIPE
        process: Any = subprocess.Popen(command, text=True, env=environment, stdin=pipe, stdout=pipe)
        self._process = process
        self._say(warm)
        if self._process.stdout.readline() != "ready\n":
            raise RuntimeError(f"posterity {' '.join(warm)} failed")

    def run(self, words: list[str], kill_after: float | None = None) -> int:
        """Run a command, killed after so many seconds if it still runs then; returns its exit code."""
        self._say(words)
        child = int(self._process.stdout.readline())
        if kill_after is not None and not select.select([self._process.stdout], [], [], kill_after)[0]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        return int(self._process.stdout.readline())

    def _say(self, words: list[str]) -> None:
        self._process.stdin.write(json.dumps(words) + "\n")
        self._process.stdin.flush()

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()


def content(folder: Path) -> dict[str, str]:
    """The sha256 of every file under a folder by its path there; of results of a study, without their seconds."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if not path.is_file():
            continue
        data = path.read_bytes()
        if path.suffix == ".json" and "scores" in (document := json.loads(data)):
            data = json.dumps({name: value for name, value in document.items() if name != "seconds"}).encode()
        found[str(path.relative_to(folder))] = hashlib.sha256(data).hexdigest()
    return found


def killed_commands(
    words: Callable[[Path], list[str]],
    kills: int,
    place: Path,
    seed: int = 0,
    part: str = ".",
    read: Callable[[Path], Mapping[str, str]] = content,
) -> Tally:
    """Kill the command `words(folder)` so often, at random in each part of its time in turn, and compare its results.

    `part` is the folder in that of the command which is compared.
    """
    spawner = Spawner(words(place / "warm"))
    try:
        begin = time.monotonic()
        if spawner.run(words(place / "whole")):
            raise RuntimeError("the undisturbed run failed")
        seconds, truth = time.monotonic() - begin, read(place / "whole" / part)
        moments, parts = random.Random(seed), itertools.cycle(range(kills))
        killed = folders = differ = 0
        while killed < kills:
            if folders == TRIES * kills:
                raise RuntimeError("the kills come after the end: runs take different times")
            folder = place / f"killed-{folders}"
            while spawner.run(words(folder), seconds * (next(parts) + moments.random()) / kills) == -signal.SIGKILL:
                killed += 1
                if killed == kills or moments.random() < 0.5:
                    break  # then run it to its end
            folders += 1
            differ += bool(spawner.run(words(folder))) or read(folder / part) != truth
            shutil.rmtree(folder)
        return Tally(killed, folders, differ)
    finally:
        spawner.close()


def fit_words(method: str, folder: Path) -> list[str]:
    """The command that fits two moons by a method."""
    return ["fit", "two-moons", "--method", method, "--out", str(folder), *f"{METHODS[method]} {FITS}".split()]


def study_words(folder: Path) -> list[str]:
    """The command of a small study."""
    return [*STUDY.split(), "--out", str(folder)]


def ray_tasks() -> list[Any]:
    """Fits of a second or so each, by several methods."""
    import posterity as po
    from posterity.inference import Task

    x = torch.linspace(-2, 2, 60).unsqueeze(1)
    rows = x, (2.0 * x).sin()
    module = po.networks.MLP([1, 10, 1])
    module.load_state_dict({name: torch.full_like(value, 0.1) for name, value in module.state_dict().items()})
    joint = po.Joint(module, po.likelihoods.Gaussian(0.1), po.priors.Normal(), num_data=60)
    methods = [po.methods.MAP(steps=1500, batch_size=20), po.methods.MeanField(steps=600, batch_size=20)]
    return [Task(f"fit {seed}", methods[seed % 2], joint, rows, seed=seed) for seed in range(TASKS)]


@contextlib.contextmanager
def two_nodes() -> Iterator[Any]:
    """A Ray cluster of two nodes with a CPU each, to which this process is connected."""
    from posterity.scale import ray as scale

    with scale.sigterm_kept():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import ray
            from ray.cluster_utils import Cluster

            cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
            cluster.add_node(num_cpus=1)
            scale.connect(cluster.address, 1)
        try:
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()  # type: ignore[no-untyped-call]


def working() -> list[int]:
    """The processes of Ray that work on a task of this process now."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and (entry / "cmdline").read_bytes().startswith(TASK) and _is_ours(entry):
                found.append(int(entry.name))
    return found


def _is_ours(entry: Path) -> bool:
    """Whether this process, or one that it started, started the process."""
    while entry.name not in ("0", "1"):
        if int(entry.name) == os.getpid():
            return True
        entry = Path("/proc") / (entry / "stat").read_text().rpartition(")")[2].split()[1]
    return False


def kill_worker(cluster: Any, moments: random.Random) -> bool:
    """Kill a worker at work; returns whether there was one."""
    workers = working()
    if workers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(moments.choice(workers), signal.SIGKILL)
            return True
    return False


def kill_node(cluster: Any, moments: random.Random) -> bool:
    """Kill the node that is not the head, with all that works there, and start another in its place."""
    node = next(node for node in cluster.list_all_nodes() if not node.head)
    cluster.remove_node(node, allow_graceful=False)
    cluster.add_node(num_cpus=1)
    return True


def killed_on_ray(kill: Callable[[Any, random.Random], bool], kills: int, place: Path, seed: int) -> Tally:
    """Kill parts of a cluster while it runs tasks, and compare the posteriors with those of tasks run in turn."""
    from posterity.inference import Ray, Sequential

    Sequential().run(ray_tasks(), place / "whole")
    truth = posteriors(place / "whole")
    moments, killed, folders, differ = random.Random(seed), 0, 0, 0
    with two_nodes() as cluster:
        executor = Ray(threads=1, retries=10)
        begin = time.monotonic()
        executor.run(ray_tasks(), place / "warm")
        seconds = time.monotonic() - begin
        while killed < kills:
            if folders == TRIES * kills:
                raise RuntimeError("the kills come after the end")
            folder = place / f"killed-{folders}"
            with ThreadPoolExecutor(1) as thread:  # nodes are started by the main thread alone
                run = thread.submit(executor.run, ray_tasks(), folder)
                time.sleep(seconds * moments.random())
                killed += kill(cluster, moments)
                run.result()
            folders += 1
            differ += posteriors(folder) != truth
            shutil.rmtree(folder)
    return Tally(killed, folders, differ)


def posteriors(folder: Path) -> dict[str, str]:
    """The content of run folders of tasks but for their traces, which hold seconds."""
    return {name: seal for name, seal in content(folder).items() if "/posterior-" in name or "/task-" in name}


def fit_case(method: str, kills: int, place: Path, seed: int) -> Tally:
    """Kill `posterity fit` by a method."""
    return killed_commands(partial(fit_words, method), kills, place, seed)


def study_case(kills: int, place: Path, seed: int) -> Tally:
    """Kill `posterity study uci`."""
    return killed_commands(study_words, kills, place, seed, "runs")


CASES: dict[str, tuple[int, Callable[[int, Path, int], Tally]]] = {
    **{method: (40, partial(fit_case, method)) for method in ("map", "mean-field", "nuts", "ensemble")},
    "study": (20, study_case),
    "ray-worker": (10, partial(killed_on_ray, kill_worker)),
    "ray-node": (10, partial(killed_on_ray, kill_node)),
}
"""By name: how often to kill, and what kills so often and compares, in an empty folder and with a seed."""


def main() -> int:
    """Run the cases; returns 1 where a folder differs."""
    options = parser(__doc__ or "")
    options.add_argument("--cases", default=",".join(CASES), help="which, with commas between them (default: all)")
    options.add_argument("--kills", type=int, help="of each case (default 40, 20 or 10)")
    given = options.parse_args()
    torch.set_num_threads(given.threads)
    facts, table = {}, [("case", "kills", "runs compared", "runs that differ", "seconds")]
    for name in given.cases.split(","):
        usual, case = CASES[name]
        begin = time.perf_counter()
        with tempfile.TemporaryDirectory() as place:
            tally = case(given.kills or usual, Path(place), given.seed)
        seconds = round(time.perf_counter() - begin, 1)
        facts[name] = {**vars(tally), "seconds": seconds}
        table.append((name, *map(str, (tally.kills, tally.folders, tally.differ, seconds))))
        print(*table[-1], flush=True)
    notes = ["Every run that was killed, and given again, must end with the bits of the undisturbed one."]
    write("kills", [], context(given, ["ray"]), facts, notes, given.results, table)
    return int(any(fact["differ"] for fact in facts.values()))


if __name__ == "__main__":
    sys.exit(main())
