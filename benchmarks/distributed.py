"""One fit in one process, in two and three of torchrun, and in two agents as two nodes: are the numbers the same?

`--kills 20` also kills one of two processes (kill -9) at a random time, so often, and starts the same command again
with one, two or three: do all end at once, and does the run end with the bits of an undisturbed one?
"""

import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from benchmarks.distributed_cases import CASES, LONG, Numbers, digest, tolerance
from benchmarks.harness import context, parser, write

MODULE = "benchmarks.distributed_cases"
LIMIT = 900.0  # seconds of one launch
LATEST = 60.0  # seconds after which a process that should have ended is given up
LAUNCHES: Mapping[str, tuple[int, int]] = {  # nodes, processes of each
    "1 process": (1, 1),
    "2 processes": (1, 2),
    "3 processes": (1, 3),
    "2 agents": (2, 1),
}


def port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def torchrun(nodes: int, each: int, arguments: Sequence[str], output: Path) -> list[subprocess.Popen[bytes]]:
    """Start an agent of torchrun for each node, on this machine."""
    place = ["--master-addr", "127.0.0.1", "--master-port", str(port())]
    head = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes",
        str(nodes),
        "--nproc-per-node",
        str(each),
        *place,
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    agents = []
    for node in range(nodes):
        with open(output.with_suffix(f".{node}.log"), "ab") as log:
            command = [*head, "--node-rank", str(node), "-m", MODULE, *arguments]
            agents.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment))
    return agents


def launched(nodes: int, each: int, arguments: Sequence[str], output: Path) -> None:
    """Run to the end, or stop with what the processes said."""
    for agent in torchrun(nodes, each, arguments, output):
        if agent.wait(LIMIT):
            sys.exit(f"{' '.join(arguments)} failed:\n" + output.with_suffix(".0.log").read_text()[-3000:])


def difference(alone: Numbers, shared: Numbers) -> float:
    """Return the largest difference, relative to the largest entry of each tensor."""
    worst = 0.0
    for name, tensor in alone.items():
        if tensor.numel():
            size = float(tensor.double().abs().max().clamp_min(1e-300))
            worst = max(worst, float((tensor.double() - shared[name].double()).abs().max()) / size)
    return worst


def alive(process: int) -> bool:
    """Return whether a process runs; one that has ended and was not waited for does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def killed(folder: Path, after: random.Random) -> tuple[int, float]:
    """Kill one of two processes; returns the step at which that was, and the seconds until all had ended."""
    (agent,) = torchrun(1, 2, ["run", str(folder)], folder / "killed")
    target, step = after.randrange(LONG), 0
    while step < target:
        if agent.poll() is not None:
            sys.exit("A run to be killed has failed:\n" + (folder / "killed.0.log").read_text()[-3000:])
        time.sleep(after.random() * 0.01)
        with suppress(OSError, ValueError):
            step = int((folder / "step").read_text())
    workers = [int((folder / f"process-{rank}").read_text()) for rank in range(2)]
    begin = time.monotonic()
    os.kill(after.choice(workers), signal.SIGKILL)
    while any(map(alive, workers)) and time.monotonic() - begin < LATEST:
        time.sleep(0.01)
    seconds = time.monotonic() - begin
    agent.wait(LIMIT)
    return step, seconds


def kills(count: int, seed: int, places: Path) -> list[dict[str, object]]:
    """Kill so many runs and finish them with one, two or three processes; one row for each."""
    reference = places / "reference"
    reference.mkdir()
    launched(1, 2, ["run", str(reference)], reference / "run")
    wanted, after, results = torch.load(reference / "result"), random.Random(seed), list[dict[str, object]]()
    for number in range(count):
        folder = places / f"killed {number}"
        folder.mkdir()
        step, seconds = killed(folder, after)
        again = number % 3 + 1
        launched(1, again, ["run", str(folder)], folder / "again")
        same = digest(torch.load(folder / "result")) == digest(wanted)
        resumed = int((folder / "resumed").read_text())
        results.append(
            {
                "killed at step": step,
                "seconds until all ended": seconds,
                "resumed at step": resumed,
                "processes then": again,
                "same bits": same,
            }
        )
        print(results[-1], flush=True)
    return results


def main() -> None:
    """Compare, kill, and write the results."""
    options = parser(__doc__ or "")
    options.add_argument("--kills", type=int, default=0, help="runs of which a process is killed (default 0)")
    options.add_argument("--only-kills", action="store_true", help="compare nothing, and write distributed_kills")
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as place:
        places = Path(place)
        if given.only_kills:
            report_kills(given, kills(given.kills, given.seed, places))
            return
        subprocess.run([sys.executable, "-m", MODULE, str(places / "alone")], check=True, capture_output=True)
        alone = torch.load(places / "alone")
        shared = {}
        for name, (nodes, each) in LAUNCHES.items():
            path = places / name.replace(" ", "-")
            launched(nodes, each, [str(path)], path)
            shared[name] = torch.load(path)
        table = [["fit", *(f"{name}, difference" for name in LAUNCHES), "allowed", "same bits in all"]]
        facts, failed = dict[str, object](), list[str]()
        for case in CASES:
            apart = {name: difference(alone[case], numbers[case]) for name, numbers in shared.items()}
            same, allowed = len({digest(numbers[case]) for numbers in shared.values()}) == 1, tolerance(case)
            facts[case] = {**apart, "allowed": allowed, "same bits": same}
            table.append([case, *(f"{value:.1e}" for value in apart.values()), f"{allowed:g}", "yes" if same else "no"])
            if not all(value <= allowed for value in apart.values()):
                failed.append(case)
        notes = [
            "Differences of all numbers of a fit (weights, precisions, draws, traces, scores) from one process without "
            "torchrun, relative to the largest entry of each tensor.",
            f"Above what is allowed: {'; '.join(failed) or 'none'}.",
        ]
        write("distributed", [], context(given), facts, notes, given.results, table)
        if given.kills:
            report_kills(given, kills(given.kills, given.seed, places))
    sys.exit(1 if failed else 0)


def report_kills(given: object, results: Sequence[Mapping[str, object]]) -> None:
    """Write the table of the kills."""
    table = [list(results[0]), *([_cell(value) for value in row.values()] for row in results)]
    ended = [float(str(row["seconds until all ended"])) for row in results]
    same = sum(bool(row["same bits"]) for row in results)
    notes = [
        f"{same} of {len(results)} ended with the bits of the undisturbed run; "
        f"after a kill all processes had ended within {max(ended):.1f} s."
    ]
    options = vars(given)
    write("distributed_kills", [], context(given), {"kills": list(results)}, notes, options["results"], table)  # type: ignore[arg-type]


def _cell(value: object) -> str:
    return (
        f"{value:.2f}"
        if isinstance(value, float)
        else "yes"
        if value is True
        else "no"
        if value is False
        else str(value)
    )


if __name__ == "__main__":
    main()
