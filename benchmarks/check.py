"""Has a step become slower? The calls of `releases`, as ratios to a deterministic step, against earlier runs here.

`results/check.json` has the ratios of earlier runs by machine (processor, cores, threads, torch). A row fails where its
ratio is 20 % above the median of the last runs, in two measurements. A run that does not fail is added to them; the
first run on a machine only records.
"""

import json
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import Contender, compare, context, parser
from benchmarks.mean_field_parts import BATCH, deterministic_step, problem
from benchmarks.releases import STEPS, calls

SLOWER = 1.2  # x the usual ratio, from which a row fails
LAST = 9  # runs whose median is the usual ratio
NETS = {"mlp": "784-400-400-10", "tiny": "2-50-50-10"}
LIMIT = "deterministic step"

Ratios = Mapping[str, float]


def usual(history: Sequence[Ratios]) -> dict[str, float]:
    """The median ratio of each row over the last runs that have it."""
    found: dict[str, list[float]] = {}
    for run in history:
        for name, ratio in run.items():
            found.setdefault(name, []).append(ratio)
    return {name: statistics.median(ratios[-LAST:]) for name, ratios in found.items()}


def slower(history: Sequence[Ratios], ratios: Ratios) -> list[str]:
    """The rows whose ratio is 20 % or more above their usual one; a row that is new is not."""
    known = usual(history)
    return [name for name, ratio in ratios.items() if not ratio < SLOWER * known.get(name, float("inf"))]


def measured(rounds: int, seed: int, names: Sequence[str] = ()) -> dict[str, float]:
    """Times of the calls (or of those named) over the deterministic step of their network, medians of rounds."""
    ratios = {}
    for net, layers in NETS.items():
        own = {name: call for name, call in calls().items() if (layers in name) == (net == "tiny")}
        own = {name: call for name, call in own.items() if name in names or not names}
        if not own:
            continue
        step = deterministic_step(*problem(net, BATCH, seed))
        limit = Contender(LIMIT, lambda step=step: partial(_repeated, step), STEPS)  # type: ignore[misc]
        each = [Contender(n, lambda c=c: c, STEPS if "step" in n else 1) for n, c in own.items()]  # type: ignore[misc]
        found = compare(layers, [limit, *each], limit=LIMIT, rounds=rounds)
        ratios.update({name: found.median_of_ratios(name) for name in own})
    return ratios


def _repeated(step: Any) -> None:
    for _ in range(STEPS):
        step()


def judged(path: Path, machine: str, about: Mapping[str, Any], ratios: Ratios, again: Any) -> list[str]:
    """The rows that fail, measured `again` by name; where there are none, the run is added to the history at `path`."""
    runs = json.loads(path.read_text()) if path.exists() else {}
    history = [run["ratios"] for run in runs.get(machine, [])]
    suspects = slower(history, ratios)
    if suspects:
        second = again(suspects)
        ratios = {name: min(ratio, second.get(name, ratio)) for name, ratio in ratios.items()}
        suspects = slower(history, ratios)
    known = usual(history)
    print(f"{machine}: {len(history)} earlier runs\n\n| row | x {LIMIT} | usual | now / usual |\n|---|---:|---:|---:|")
    for name, ratio in ratios.items():
        before = f"{known[name]:.3f} | {ratio / known[name]:.3f}" if name in known else "new | "
        print(f"| {name} | {ratio:.3f} | {before}{' SLOWER' * (name in suspects)} |")
    if not suspects:
        runs.setdefault(machine, []).append({"date": about["date"], "ratios": dict(ratios)})
        path.write_text(json.dumps(runs, indent=1) + "\n")
        print("\nRecorded." if history else f"\nNo history on this machine: recorded in {path}, nothing compared.")
    return suspects


def main() -> None:
    """Measure, compare and record; exit with 1 if a row has become slower."""
    options = parser(__doc__ or "").parse_args()
    torch.set_num_threads(options.threads)
    about = context(options)
    ran_on = about["machine"]
    machine = f"{ran_on['cpu']}, {ran_on['cores']} cores, {options.threads} threads, torch {torch.__version__}"
    again = partial(measured, options.rounds, options.seed)
    failed = judged(options.results / "check.json", machine, about, again(), again)
    if failed:
        raise SystemExit(f"{len(failed)} rows are {SLOWER - 1:.0%} slower than usual: {', '.join(failed)}.")


if __name__ == "__main__":
    main()
