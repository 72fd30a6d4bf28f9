"""NUTS, ChEES and MAMS: least bulk effective sample size a second, 4 and 64 chains, against NumPyro, BlackJAX and Pyro.

Both targets are told in `mcmc_targets.py`. Contenders take turns, each with a new seed in each round, the same for all.
"compile s" is what JAX takes to trace and compile all of a run, and what a first run of `posterity` takes beyond the
same run again; "run s" is a whole run after that, warm-up and draws, with the draws in memory of the CPU at its end,
and "CPU s" what it took of the processor, which other load does not touch much. All have the same cores: the process
keeps to as many as `--threads` says, which binds the threads of JAX as well. torch keeps machine code on the disk: with
`TORCHINDUCTOR_CACHE_DIR` at an empty folder a run is cold, and warm with the same folder again. `--device cuda`
compares 1,024 chains with NumPyro's on the same GPU.
"""

import argparse
import json
import math
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import cycle
from typing import Any

import torch

from benchmarks import mcmc_samplers as samplers
from benchmarks.harness import context, parser, report
from benchmarks.mcmc_samplers import Length, Sampler, diagnosed, mean_depth
from benchmarks.mcmc_targets import TARGETS, Target

OURS, NUMPYRO, BLACKJAX, PYRO = "posterity", "NumPyro (vectorized)", "BlackJAX (vmap)", "Pyro (in turn)"
CHEES, MAMS = "posterity, ChEES", "posterity, MAMS"
BUILD: dict[str, Callable[..., Sampler]] = {
    BLACKJAX: samplers.blackjax,
    NUMPYRO: samplers.numpyro,
    OURS: samplers.posterity,
    CHEES: partial(samplers.posterity, kind="ChEES"),
    MAMS: partial(samplers.posterity, kind="MAMS"),
    PYRO: samplers.pyro,
}
SHORT = {"blackjax": BLACKJAX, "numpyro": NUMPYRO, "posterity": OURS, "chees": CHEES, "mams": MAMS, "pyro": PYRO}
# The least ratio of ESS/s to a peer's, by target, chains and peer, that was asked for.
WANTED = {
    ("logistic", 4): {BLACKJAX: 0.7, PYRO: 20.0},
    ("logistic", 64): {BLACKJAX: 1.0, PYRO: 20.0},
    ("net", 4): {BLACKJAX: 0.7, NUMPYRO: 0.5, PYRO: 20.0},
    ("net", 64): {BLACKJAX: 0.7, NUMPYRO: 1.0, PYRO: 20.0},
    ("logistic", 1024): {NUMPYRO: 1.0},
    ("net", 1024): {NUMPYRO: 1.0},
}
BEST, BEST_COLD = 1.0, 0.8  # of our adjusted samplers, to BlackJAX's NUTS: after compiling, and with it
PYRO_CHAINS = 4
DEEPEST, WORST_RHAT = 7.0, 1.02  # of the net: mean depth, and R-hat of f
HEAD = (
    *("contender", "compile s", "run s", "CPU s", "min bulk ESS", "ESS/s", "ESS/s with compile", "max R-hat"),
    *("leapfrogs a draw", "mean depth", "divergences"),
)


@dataclass(frozen=True)
class Round:
    """One run of one contender."""

    seed: int
    seconds: float
    cpu_seconds: float
    ess: float
    rhat: float
    leapfrogs: float
    depth: float
    divergences: int

    @property
    def rate(self) -> float:
        """Effective draws a second."""
        return self.ess / self.seconds


@dataclass
class Row:
    """A contender's rounds, the seconds it took to build, and those of a first run where that is what compiles.

    The first run has the seed of the first round, so that the two do the same work but for the compilation.
    """

    name: str
    length: Length
    build_seconds: float
    first_seconds: float | None = None
    rounds: list[Round] = field(default_factory=list)

    def median(self, name: str) -> float:
        """Median over rounds of one of their numbers."""
        return statistics.median(getattr(each, name) for each in self.rounds)

    @property
    def compile_seconds(self) -> float:
        """The building, and what the first run took beyond the same run again."""
        first = 0.0 if self.first_seconds is None else max(0.0, self.first_seconds - self.rounds[0].seconds)
        return self.build_seconds + first

    @property
    def rate_from_start(self) -> float:
        """Effective draws a second where what compiles counts."""
        rate: float = self.median("ess") / (self.median("seconds") + self.compile_seconds)
        return rate

    def ratio(self, other: "Row") -> float:
        """Median over rounds of the ratio of ESS/s to the other's in the same round, or in its only one."""
        return statistics.median(
            own.rate / its.rate for own, its in zip(self.rounds, cycle(other.rounds), strict=False)
        )


@dataclass(frozen=True)
class Table:
    """All contenders on one target with one number of chains."""

    target: str
    title: str
    chains: int
    rows: Mapping[str, Row]
    skipped: Mapping[str, str]

    def lines(self) -> list[str]:
        """The table as Markdown; numbers are medians over rounds."""
        peers = [name for name in (BLACKJAX, NUMPYRO, PYRO) if name in self.rows]
        head = (*HEAD, *(f"x {name.split()[0]} by round" for name in peers))
        lines = [f"## {self.title}, {self.chains} chains", "", "| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
        for row in self.rows.values():
            numbers = [
                *(
                    row.compile_seconds,
                    *map(row.median, ("seconds", "cpu_seconds", "ess", "rate")),
                    row.rate_from_start,
                ),
                *(max(each.rhat for each in row.rounds), row.median("leapfrogs"), row.median("depth")),
            ]
            cells = [row.name, *("" if math.isnan(value) else f"{value:.4g}" for value in numbers)]
            cells += [f"{row.median('divergences'):g}", *(f"{row.ratio(self.rows[name]):.3f}" for name in peers)]
            lines.append("| " + " | ".join(cells) + " |")
        blank = " |" * (len(head) - 1)
        return [*lines, *(f"| {name} | skipped: {why}{blank}" for name, why in self.skipped.items()), ""]

    def notes(self) -> list[str]:
        """What was asked for and what came, and whether the target is what it should be."""
        said = []
        for name, wanted in WANTED.get((self.target, self.chains), {}).items():
            if OURS in self.rows and name in self.rows:
                ratio = self.rows[OURS].ratio(self.rows[name])
                word = "within" if ratio >= wanted else "below"
                said.append(
                    f"{self.title}, {self.chains} chains: {ratio:.3f} x the ESS/s of {name} by round, {word} the "
                    f"{wanted:g} that was asked for."
                )
        ours = [self.rows[name] for name in (OURS, CHEES, MAMS) if name in self.rows]
        if ours and BLACKJAX in self.rows:
            peer = self.rows[BLACKJAX]
            best = max(row.ratio(peer) for row in ours)
            cold = max(row.rate_from_start for row in ours) / peer.rate_from_start
            said.append(
                f"{self.title}, {self.chains} chains: our best sampler has {best:.3f} x the ESS/s of {BLACKJAX} by "
                f"round, and {cold:.3f} x with what compiles. Wanted: {BEST:g}, and {BEST_COLD:g} from an empty cache."
            )
        for row in self.rows.values() if self.target == "net" else ():
            deepest, worst = (max(getattr(each, name) for each in row.rounds) for name in ("depth", "rhat"))
            if deepest > DEEPEST or worst > WORST_RHAT:
                said.append(
                    f"{row.name}, {self.title}, {self.chains} chains: mean depth up to {deepest:.2f} and R-hat up to "
                    f"{worst:.4f}, beyond {DEEPEST:g} or {WORST_RHAT:g}."
                )
        return said


def one_round(sampler: Sampler, target: Target, seed: int) -> Round:
    """A timed run, and what its draws are worth, off the clock."""
    begin, begin_cpu = time.perf_counter(), time.process_time()
    drawn = sampler.sample(seed)
    seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - begin_cpu
    ess, rhat = diagnosed(target.quantities(drawn.theta))
    leapfrogs, divergences = float(drawn.leapfrogs.mean()), int(drawn.divergent.sum())
    return Round(seed, seconds, cpu_seconds, ess, rhat, leapfrogs, mean_depth(drawn.leapfrogs), divergences)


def why(error: Exception) -> str:
    """One line on why a contender is left out."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def in_turn(target: Target, given: argparse.Namespace) -> tuple[dict[str, Row], dict[str, str]]:
    """Pyro's row, from one round of a few chains, or why there is none; it compiles nothing."""
    length = Length(PYRO_CHAINS, given.pyro_draws, given.pyro_draws)
    try:
        found = one_round(BUILD[PYRO](target, length, given.device), target, given.seed + 1)
    except Exception as error:
        return {}, {PYRO: why(error)}
    print(f"{target.name}, {PYRO}: {found}", flush=True)
    return {PYRO: Row(PYRO, length, 0.0, None, [found])}, {}


def measure(target: Target, chains: int, given: argparse.Namespace, names: Sequence[str]) -> Table:
    """The contenders in turn, each after it has compiled; one that cannot be built or run is a row that says why."""
    rows: dict[str, Row] = {}
    skipped: dict[str, str] = {}
    built: dict[str, Sampler] = {}
    length = Length(chains, given.warmup, given.draws)
    for name in names:
        begin = time.perf_counter()
        try:
            sampler = BUILD[name](target, length, given.device)
            built_in, first = time.perf_counter() - begin, None
            if not sampler.compiled:
                sampler.sample(given.seed + 1)
                first = time.perf_counter() - begin - built_in
        except Exception as error:
            if name == OURS:
                raise
            skipped[name] = why(error)
            continue
        built[name], rows[name] = sampler, Row(name, length, built_in, first)
        print(f"{target.name}, {chains} chains, {name}: built in {built_in:.2f} s, first run {first} s", flush=True)
    order = list(rows)
    for turn in range(given.rounds):
        for name in order[turn % len(order) :] + order[: turn % len(order)] if order else ():
            found = one_round(built[name], target, given.seed + 1 + turn)
            rows[name].rounds.append(found)
            print(f"{target.name}, {chains} chains, {name}: {found}", flush=True)
    return Table(target.name, target.title, chains, rows, skipped)


def write(topic: str, tables: Sequence[Table], about: Mapping[str, Any], notes: Sequence[str], folder: Any) -> None:
    """`<topic>.json` with every round and `<topic>.md` with the tables, which is printed as well."""
    results = [asdict(table) for table in tables]
    text = "\n".join(line for table in tables for line in table.lines()) + "\n" + report([], about, notes)
    folder.mkdir(parents=True, exist_ok=True)
    document = {"topic": topic, **about, "notes": list(notes), "tables": results}
    (folder / f"{topic}.json").write_text(json.dumps(document, indent=1) + "\n")
    (folder / f"{topic}.md").write_text(f"# {topic.replace('_', ' ')}\n\n{text}")
    print(text)


def same_cores(threads: int) -> None:
    """Keep the process, and so JAX's pool of threads too, to as many cores as torch has threads."""
    torch.set_num_threads(threads)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-threads:])


def jax_devices() -> str:
    """Where JAX computes, as a word; float32 products are whole ones, as in torch."""
    try:
        import jax
    except ImportError:
        return "not installed"
    jax.config.update("jax_default_matmul_precision", "highest")
    return ", ".join(f"{each.platform}:{each.device_kind}" for each in jax.devices())


def options() -> argparse.ArgumentParser:
    """The options of the command; `chains` and `contenders` have defaults of their own for each device."""
    known = parser(__doc__ or "")
    known.set_defaults(rounds=3)
    known.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where to sample (default cpu)")
    known.add_argument("--targets", default=",".join(TARGETS), help="which targets (default: all)")
    known.add_argument("--chains", help="numbers of chains (default 4,64; on CUDA 1024)")
    known.add_argument("--contenders", help=f"of {','.join(SHORT)} (default: all; on CUDA numpyro,posterity)")
    known.add_argument("--warmup", type=int, default=1000, help="transitions of adaptation (default 1000)")
    known.add_argument("--draws", type=int, default=1000, help="draws of each chain (default 1000)")
    known.add_argument("--pyro-draws", type=int, default=500, help="the same for Pyro, warm-up as well (default 500)")
    return known


def main() -> None:
    """Run all and write `mcmc_nuts.json` and `mcmc_nuts.md` (`mcmc_nuts_cuda` on a GPU)."""
    given = options().parse_args()
    cuda = given.device == "cuda"
    if cuda and not torch.cuda.is_available():
        sys.exit("mcmc_nuts --device cuda needs a CUDA device, and torch sees none.")
    given.chains = given.chains or ("1024" if cuda else "4,64")
    given.contenders = given.contenders or ("numpyro,posterity" if cuda else ",".join(SHORT))
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # else JAX takes most of the GPU from torch
    if not cuda:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        same_cores(given.threads)
    warnings.filterwarnings("ignore", category=FutureWarning)  # of the peers' own use of each other
    about = context(given, samplers.PACKAGES)
    about["machine"]["jax"] = jax_devices()
    if cuda:
        about["machine"]["gpu"] = torch.cuda.get_device_name(0)
    print(f"JAX computes on: {about['machine']['jax']}", flush=True)
    notes = [
        f"Warm-up of {given.warmup:,} and {given.draws:,} draws of each chain; numbers are medians over {given.rounds} "
        "rounds, each with a new seed, R-hat the largest of them. All start at draws of the prior and have a target "
        "acceptance of 0.8, a diagonal mass matrix and depths up to 10, but for ChEES and MAMS, which have their own "
        "defaults and learn correlations of up to 100 parameters. float32, products not rounded further."
    ]
    if cuda:
        notes.append(f"On one {about['machine']['gpu']}, CUDA {torch.version.cuda}; JAX on {about['machine']['jax']}.")
    else:
        notes.append("The process keeps to as many cores as torch has threads; JAX's threads are bound to them too.")
    names = [SHORT[short] for short in given.contenders.split(",")]
    if PYRO in names:
        notes.append(
            f"Pyro: one round of {PYRO_CHAINS} chains of {given.pyro_draws} and {given.pyro_draws}, as it is slow. Its "
            "chains run one after the other, so that more of them have the same ESS/s; all tables of a target show the "
            "same row. Short chains adapt worse, and their least ESS is estimated a little low."
        )
    tables: list[Table] = []
    topic = "mcmc_nuts_cuda" if cuda else "mcmc_nuts"
    for target in (TARGETS[name]() for name in given.targets.split(",")):
        slow, without = in_turn(target, given) if PYRO in names else ({}, {})
        for chains in map(int, given.chains.split(",")):
            table = measure(target, chains, given, [name for name in names if name != PYRO])
            tables.append(replace(table, rows={**table.rows, **slow}, skipped={**table.skipped, **without}))
            said = [note for table in tables for note in table.notes()]
            write(topic, tables, about, [*said, *notes], given.results)


if __name__ == "__main__":
    main()
