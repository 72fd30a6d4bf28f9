"""Unadjusted MCLMC beside NUTS: seconds until the squared bias of first and second moments is at most 0.01.

The targets and their quantities are those of `mcmc_targets.py`. The squared bias after n draws is that of the mean over
n draws of each chain, (mean - truth)^2 / variance, averaged over chains and quantities, for x and for x^2. The truth is
a long run of ChEES, which is exact and shares no step with either. The seconds are those of the warm-up and of the
draws until then: a run's time is divided over its transitions by their gradients. Runs take turns; the first of each,
which records or compiles, is off the clock, and "first run" tells its seconds.
"""

import json
import statistics
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import posterity as po
from benchmarks.harness import context, parser, report
from benchmarks.mcmc_targets import TARGETS, Target
from posterity.diagnostics import bulk_ess
from posterity.methods import MCLMC, NUTS, ChEES

WANTED = 0.01


@dataclass(frozen=True)
class Arrival:
    """Seconds of a run, seconds until both squared biases are small (None: never), and both at the end of the run."""

    seconds: float
    arrived: float | None
    first: float
    second: float


def drawn(target: Target, method: po.inference.Method, density: po.Density, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Quantities (C, D, Q), and the share of the run's gradients that were taken before the end of each draw (D,)."""
    q: Any
    q, trace = po.infer(method, density, None, seed=seed, progress=False)
    work = trace["leapfrogs"].amax(-1).cumsum(0)
    kept = len(q.statistics["leapfrogs"][0])
    return target.quantities(q.theta.numpy()).astype(np.float64), (work / work[-1]).numpy()[-kept:]


def moments(values: np.ndarray) -> np.ndarray:
    """Values and their squares (2, ...)."""
    return np.stack([values, values**2])


def arrival(values: np.ndarray, share: np.ndarray, seconds: float, truth: tuple[np.ndarray, np.ndarray]) -> Arrival:
    """When the squared biases (2, D) of all draws so far are small and stay so."""
    mean, variance = truth  # (2, Q)
    count = np.arange(1, values.shape[1] + 1)[:, None]
    so_far = moments(values).cumsum(2) / count  # (2, C, D, Q)
    bias = ((so_far - mean[:, None, None]) ** 2 / variance[:, None, None]).mean((1, 3)).max(0)
    above = np.flatnonzero(bias > WANTED)
    index = above[-1] + 1 if len(above) else 0
    last = ((so_far[:, :, -1] - mean[:, None]) ** 2 / variance[:, None]).mean((1, 2))
    return Arrival(seconds, float(share[index] * seconds) if index < len(share) else None, *map(float, last))


def main() -> None:
    """Run and write `mcmc_bias.json` and `mcmc_bias.md`."""
    options = parser(__doc__ or "")
    options.set_defaults(rounds=3)
    options.add_argument("--targets", default=",".join(TARGETS), help="which targets (default: all)")
    options.add_argument("--chains", type=int, default=4, help="chains (default 4)")
    options.add_argument("--warmup", type=int, default=500, help="transitions of adaptation (default 500)")
    options.add_argument("--draws", type=int, default=1000, help="draws of each chain (default 1000)")
    options.add_argument("--reference", type=int, default=2000, help="draws of 16 chains of the truth (default 2000)")
    given = options.parse_args()
    torch.set_num_threads(given.threads)
    rows: list[tuple[str, ...]] = [
        ("target", "method", "first run s", "run s", "s to 0.01", "x NUTS", "bias^2 of x at end", "of x^2")
    ]
    notes, results = [], []
    length = {"draws": given.draws, "warmup": given.warmup, "chains": given.chains}
    methods: dict[str, po.inference.Method] = {"NUTS": NUTS(**length), "MCLMC": MCLMC(**length)}
    for target in (TARGETS[name]() for name in given.targets.split(",")):
        of_theta = target.torch_density(torch.device("cpu"))
        density = po.Density(of_theta, {"theta": (target.size,)}, batched=True, dtype=torch.float32)
        long = ChEES(draws=given.reference, warmup=1000, chains=16)
        values, _ = drawn(target, long, density, given.seed + 1000)
        ess = float(bulk_ess(torch.from_numpy(values)).min())
        notes.append(f"{target.title}: the truth has an effective sample size of {ess:,.0f} at least.")
        truth = moments(values).mean((1, 2)), moments(values).var((1, 2))
        found: dict[str, list[Arrival]] = {name: [] for name in methods}
        first = {}
        for turn in range(given.rounds + 1):
            for name, method in methods.items():
                begin = time.perf_counter()
                values, share = drawn(target, method, density, given.seed + max(1, turn))
                seconds = time.perf_counter() - begin
                if turn:
                    found[name].append(arrival(values, share, seconds, truth))
                    print(target.name, name, found[name][-1], flush=True)
                else:
                    first[name] = seconds
        for name, arrivals in found.items():
            pairs = zip(arrivals, found["NUTS"], strict=True)
            ratios = [own.arrived / its.arrived for own, its in pairs if own.arrived and its.arrived]
            times = [each.arrived for each in arrivals if each.arrived]
            whole = len(ratios) == len(arrivals)
            cells = [first[name], statistics.median(each.seconds for each in arrivals)]
            cells += [statistics.median(times), statistics.median(ratios)] if whole else [float("nan")] * 2
            cells += [statistics.median(getattr(each, which) for each in arrivals) for which in ("first", "second")]
            rows.append((target.name, name, *(f"{cell:.3g}" for cell in cells)))
            results.append({"target": target.name, "method": name, "arrivals": [vars(each) for each in arrivals]})
    about = context(given)
    notes += [
        f"{given.chains} chains, {given.warmup:,} and {given.draws:,} transitions, medians of {given.rounds} rounds, "
        "ratios by round. `nan`: not within every run."
    ]
    text = report([], about, notes, rows)
    given.results.mkdir(parents=True, exist_ok=True)
    document = {"topic": "mcmc_bias", **about, "notes": notes, "results": results}
    (given.results / "mcmc_bias.json").write_text(json.dumps(document, indent=1) + "\n")
    (given.results / "mcmc_bias.md").write_text(f"# mcmc bias\n\n{text}")
    print(text)


if __name__ == "__main__":
    main()
