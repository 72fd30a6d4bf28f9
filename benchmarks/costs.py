"""How long methods take: rates fitted to short runs of three sizes, checked at a fourth and on six unseen settings.

Times are CPU times of one thread. The work of a run comes from its shapes (`Method.work`), its memory from
`posterity.plan`. Rates (`posterity.inference.costs`) are fitted for each kind of work by non-negative least squares on
relative errors, over three networks, with three sizes of batches each, and 1, 2 and 4 draws or chains. The fourth size
and the six settings take no part in that. With `--rates` the rates are written to `posterity/inference/rates.py`.
"""

import json
import logging
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch

import posterity as po
from benchmarks.harness import context, parser, write
from benchmarks.memory import peak_bytes
from posterity.inference import Callback, Method, Run
from posterity.inference.costs import features
from posterity.inference.method import Work
from posterity.methods.parts.gradients.drawn_weights import WeightSampling

LIMIT = 30.0  # per cent, wanted
m, c = po.methods, po.curvature
STEPWISE = {
    "MAP": lambda steps, rows, draws: m.MAP(steps=steps, batch_size=rows, optimizer=po.optim.Adam()),
    "MeanField": lambda steps, rows, draws: m.MeanField(
        steps=steps, batch_size=rows, optimizer=po.optim.Adam(), estimator=WeightSampling(draws)
    ),
    "NaturalGradient": lambda steps, rows, draws: m.NaturalGradient(
        steps=steps, batch_size=rows, step_size=0.01, estimator=WeightSampling(draws)
    ),
    "SGHMC": lambda steps, rows, draws: m.SGHMC(
        warmup=0, draws=1, thin=steps, batch_size=rows, chains=draws, step_size=1e-4
    ),
    "leapfrogs": lambda steps, rows, draws: m.HMC(
        warmup=0, draws=max(3, steps // 4), chains=draws, steps=4, step_size=1e-4
    ),
    "ensemble": lambda steps, rows, draws: m.Ensemble(
        m.MAP(steps=steps, batch_size=rows, optimizer=po.optim.Adam()), size=draws
    ),
}
PASSES = {
    "Laplace, Diagonal": lambda rows: m.Laplace(structure=c.Diagonal(), tuning=None, batch_size=rows),
    "Laplace, Kronecker": lambda rows: m.Laplace(structure=c.Kronecker(), tuning=None, batch_size=rows),
    "Laplace, Full": lambda rows: m.Laplace(structure=c.Full(), tuning=None, batch_size=rows),
    "Conjugate": lambda rows: m.Conjugate(batch_size=rows),
}


class Clock(Callback):
    """Notes the CPU time before the first step and after each: others on the machine do not lengthen it."""

    def __init__(self) -> None:
        self.stamps: list[float] = []

    def start(self, run: Run) -> None:
        self.after_step(run)

    def after_step(self, run: Run) -> None:
        self.stamps.append(time.process_time())


@dataclass(frozen=True)
class Setting:
    """A short run of a contender, by name: a network by its layers, rows in a batch, and draws, chains or members.

    `data` is the number of rows in all: those of the batch where a step takes all rows.
    """

    name: str
    layers: tuple[int, ...]
    rows: int
    draws: int = 1
    data: int = 0

    @property
    def words(self) -> str:
        """The setting in words."""
        draws = f", {self.draws} draws, chains or members" if self.draws > 1 else ""
        data = f"{self.data:,} rows, " if self.data else ""
        return f"{'-'.join(map(str, self.layers))}, {data}batch {self.rows:,}{draws}"

    def problem(self) -> tuple[po.Joint, tuple[torch.Tensor, torch.Tensor], Method]:
        """The joint, random rows, and the method; a network of two numbers is a linear map under Gaussian noise."""
        generator = torch.Generator("cpu").manual_seed(0)
        count = self.data or (self.rows if self.name == "leapfrogs" else 4 * self.rows)
        x = torch.randn(count, self.layers[0], generator=generator, device="cpu")
        torch.manual_seed(0)
        if len(self.layers) == 2:
            likelihood: Any = po.likelihoods.Gaussian(scale=1.0)
            y, network = (
                torch.randn(count, self.layers[-1], generator=generator, device="cpu"),
                torch.nn.Linear(*self.layers),
            )
        else:
            likelihood, y = (
                po.likelihoods.Categorical(),
                torch.randint(self.layers[-1], (count,), generator=generator, device="cpu"),
            )
            network = po.networks.MLP(self.layers, activation="relu")
        joint = po.Joint(network, likelihood, po.priors.Normal(1.0), num_data=count)
        if self.name in PASSES:
            return joint, (x, y), PASSES[self.name](self.rows)
        guess = 3 * self.draws * self.rows * joint.num_weights / 2e10  # seconds, for as many steps as a run needs
        return joint, (x, y), STEPWISE[self.name](min(60, max(12, int(0.3 / guess))), self.rows, self.draws)

    def work(self) -> Work:
        """The work of the run."""
        joint, rows, method = self.problem()
        data = po.as_data(rows)
        found = method.settled(joint, data).work(joint, data)
        assert found is not None
        return found

    def timer(self) -> Callable[[], float]:
        """A call that runs it and returns the seconds: from the first step of a pass on, or the median of one step."""
        joint, rows, method = self.problem()

        def measure() -> float:
            clock = Clock()
            po.infer(method, joint, rows, callbacks=[clock], progress=False)
            if self.name in PASSES:
                return time.process_time() - clock.stamps[0]
            each = statistics.median(np.diff(clock.stamps[len(clock.stamps) // 4 :]))
            return float(each) / (4 if self.name == "leapfrogs" else 1)

        return measure

    def predicted(self, rates: Mapping[str, Sequence[float]]) -> float:
        """The seconds by the rates, of what `timer` measures."""
        work = self.work()
        assert work.units is not None
        counts = features(work, work.units if self.name in PASSES else 1)
        whole = len(counts) if self.name in PASSES else 3  # a step is apart from what comes at the end
        return float(sum(rate * count for rate, count in zip(rates[work.kind][:whole], counts, strict=False)))


def grid(name: str, networks: Sequence[tuple[int, ...]], batches: Sequence[int], data: int = 0) -> list[Setting]:
    """Three networks by three batches; 1, 2 and 4 draws come once with each network and each batch."""
    drawn = name in STEPWISE and name != "MAP"
    return [
        Setting(name, network, rows, (1, 2, 4)[(i + j) % 3] if drawn else 1, data * rows)
        for i, network in enumerate(networks)
        for j, rows in enumerate(batches)
    ]


NETWORKS = ((20, 50, 50, 2), (100, 200, 200, 5), (784, 400, 400, 10))
FITTED = [
    *(s for name in STEPWISE if name != "ensemble" for s in grid(name, NETWORKS, (64, 256, 1024))),
    *grid("Laplace, Diagonal", NETWORKS, (64, 256, 1024), 2),
    *grid("Laplace, Kronecker", NETWORKS, (64, 256, 1024), 2),
    *grid("Laplace, Full", ((5, 10, 2), (10, 20, 20, 2), (20, 30, 20, 3)), (64, 256, 512), 4),
    *grid("Conjugate", ((30, 2), (100, 3), (200, 3)), (64, 256, 1024), 4),
]
FOURTH = [
    *(Setting(name, (400, 600, 600, 8), 512, 1 if name == "MAP" else 2) for name in STEPWISE if name != "ensemble"),
    Setting("Laplace, Diagonal", (400, 600, 600, 8), 512, data=2048),
    Setting("Laplace, Kronecker", (400, 600, 600, 8), 512, data=2048),
    Setting("Laplace, Full", (15, 25, 25, 3), 300, data=900),
    Setting("Conjugate", (150, 4), 512, data=2048),
]
UNSEEN = [
    Setting("MAP", (300, 600, 300, 600, 8), 384),
    Setting("MeanField", (500, 700, 7), 192, 3),
    Setting("ensemble", (200, 300, 300, 6), 128, 5),
    Setting("Laplace, Kronecker", (300, 350, 250, 6), 500, data=3000),
    Setting("Laplace, Diagonal", (600, 500, 500, 500, 8), 800, data=4000),
    Setting("SGHMC", (400, 600, 400, 4), 320, 3),
]


def timed(settings: Sequence[Setting], rounds: int) -> list[float]:
    """The least seconds of each over so many rounds in turn, after one that warms up."""
    timers = [setting.timer() for setting in settings]
    taken = [[timer() for timer in timers] for _ in range(1 + rounds)]
    return [min(each) for each in zip(*taken[1:], strict=True)]


def fit(counts: Sequence[Sequence[float]], taken: Sequence[float]) -> tuple[float, ...]:
    """Non-negative rates with the least sum of squared relative errors: the best of all subsets of counts.

    >>> fit([(1.0, 0.0), (0.0, 1.0), (1.0, 1.0)], [2.0, 3.0, 5.0])
    (2.0, 3.0)
    """
    relative = np.array(counts) / np.array(taken)[:, None]
    scale = np.where(relative.max(0) > 0, relative.max(0), 1.0)
    best, rates = np.inf, np.zeros(len(scale))
    for size in range(1, len(scale) + 1):
        for chosen in combinations(range(len(scale)), size):
            some = np.linalg.lstsq(relative[:, chosen] / scale[list(chosen)], np.ones(len(taken)), rcond=None)[0]
            full = np.zeros(len(scale))
            full[list(chosen)] = some / scale[list(chosen)]
            error = float(((relative @ full - 1.0) ** 2).sum())
            if (some >= 0).all() and error < best - 1e-12:
                best, rates = error, full
    return tuple(float(f"{rate:.4g}") for rate in rates)


def fitted(settings: Sequence[Setting], taken: Sequence[float]) -> dict[str, tuple[float, ...]]:
    """Rates by kind of work."""
    works = [setting.work() for setting in settings]
    rates = {}
    for kind in dict.fromkeys(work.kind for work in works):
        own = [index for index, work in enumerate(works) if work.kind == kind]
        counts = []
        for index in own:
            units = works[index].units if settings[index].name in PASSES else 1
            assert units is not None
            whole = features(works[index], units)
            counts.append(whole if settings[index].name in PASSES else (*whole[:3], 0.0))
        rates[kind] = fit(counts, [taken[index] for index in own])
    return rates


def memory(setting: Setting) -> tuple[int, int]:
    """Planned and measured bytes beside the rows, in this process."""
    Setting(setting.name, (3, 4, 2), 8, setting.draws, 16 if setting.data else 0).timer()()  # what torch loads at first
    joint, rows, method = setting.problem()
    planned = po.plan(method, joint, rows)
    return planned.total - planned.parts["data"], peak_bytes(lambda: po.infer(method, joint, rows, progress=False))


def memories(settings: Sequence[Setting]) -> list[tuple[int, int]]:
    """`memory` of each in a new process, where freed blocks go back to the system."""
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "100000", "OMP_NUM_THREADS": "1"}
    found = []
    for index in range(len(settings)):
        words = [sys.executable, "-m", "benchmarks.costs", "--memory", str(index)]
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
        planned, taken = json.loads(done.stdout.splitlines()[-1])
        found.append((planned, taken))
    return found


def off(predicted: float, measured: float) -> float:
    """The error in per cent of the measured."""
    return 100.0 * (predicted / measured - 1.0)


def write_rates(path: Path, rates: Mapping[str, Sequence[float]], about: Mapping[str, Any]) -> None:
    """Write the module of the rates, in the form that it has."""
    head, _, rest = path.read_text().partition("ORIGIN = ")
    middle = rest.partition("\n")[2].partition("RATES: ")[0]
    tail = path.read_text().rpartition('"""By kind')[2]
    origin = f"{about['machine']['cpu']}, {about['threads']} thread, {about['date'][:10]}"
    table = "".join(f'    "{kind}": ({", ".join(f"{rate:.4g}" for rate in own)}),\n' for kind, own in rates.items())
    kind = "dict[str, tuple[float, float, float, float]]"
    path.write_text(f'{head}ORIGIN = "{origin}"\n{middle}RATES: {kind} = {{\n{table}}}\n"""By kind{tail}')


def main() -> int:
    """Time, fit, predict, print and write."""
    options = parser(__doc__ or "")
    options.set_defaults(rounds=3)
    options.add_argument("--memory", type=int, help="print planned and measured bytes of one unseen setting")
    options.add_argument("--rates", action="store_true", help="write the rates into the library")
    given = options.parse_args()
    if given.threads != 1:
        options.error("the rates are of one thread: leave --threads out")
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)  # these short runs reach no mode, and do not mix
    if given.memory is not None:
        print(json.dumps(memory(UNSEEN[given.memory])))
        return 0
    began = time.process_time()
    every = [*FITTED, *FOURTH, *UNSEEN]
    taken = timed(every, given.rounds)
    rates = fitted(FITTED, taken[: len(FITTED)])
    sizes = memories(UNSEEN)
    parts = [*(["fitted"] * len(FITTED)), *(["fourth size"] * len(FOURTH)), *(["unseen"] * len(UNSEEN))]
    table = [["part", "work", "setting", "measured ms", "predicted ms", "off %", "peak MB", "planned MB", "off %"]]
    facts: dict[str, Any] = {"rates": rates, "rows": []}
    for index, (setting, part, seconds) in enumerate(zip(every, parts, taken, strict=True)):
        found = setting.predicted(rates)
        row = {"part": part, "name": setting.name, "setting": setting.words, "measured": seconds, "predicted": found}
        cells = [part, setting.name, setting.words, f"{1e3 * seconds:.4g}", f"{1e3 * found:.4g}"]
        cells.append(f"{off(found, seconds):+.0f}")
        if part == "unseen":
            planned, peak = sizes[index - len(FITTED) - len(FOURTH)]
            row |= {"planned": planned, "peak": peak}
            cells += [f"{peak / 1e6:.1f}", f"{planned / 1e6:.1f}", f"{off(planned, peak):+.0f}"]
        facts["rows"].append(row)
        table.append([*cells, *([""] * (9 - len(cells)))])
    about = context(given)
    write("costs", [], about, facts, notes(facts, given.rounds, time.process_time() - began), given.results, table)
    if given.rates:
        write_rates(Path(po.__file__).parent / "inference" / "rates.py", rates, about)
    return 0


def notes(facts: Mapping[str, Any], rounds: int, spent: float) -> list[str]:
    """What the rows say, in sentences."""
    found = []
    for part in ("fitted", "fourth size", "unseen"):
        errors = [abs(off(row["predicted"], row["measured"])) for row in facts["rows"] if row["part"] == part]
        within = sum(error <= LIMIT for error in errors)
        found.append(
            f"Time, {part}: {within} of {len(errors)} within {LIMIT:.0f} %, the worst {max(errors):.0f} % off."
        )
    errors = [abs(off(row["planned"], row["peak"])) for row in facts["rows"] if row["part"] == "unseen"]
    within = sum(error <= LIMIT for error in errors)
    found.append(f"Memory, unseen: {within} of {len(errors)} within {LIMIT:.0f} %, the worst {max(errors):.0f} % off.")
    found.append(
        "CPU time: a step (a leapfrog) of all draws, chains or members, the median in a run; a pass of Laplace and "
        f"Conjugate, with all that follows. The least of {rounds} runs in turn, after one that warms up. Memory: "
        "growth of the resident set in a run of its own process, beside the rows."
    )
    own = "; ".join(f"{kind} {', '.join(f'{rate:.3g}' for rate in rates)}" for kind, rates in facts["rates"].items())
    found.append(f"Rates, seconds a multiply-add, a byte, a unit, and a multiply-add at the end: {own}.")
    return [*found, f"{spent:.0f} s of CPU."]


if __name__ == "__main__":
    sys.exit(main())
