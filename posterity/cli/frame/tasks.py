"""From names to things: the data set, the network, the problem and the methods of a command line, and their runs."""

import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from posterity.cli.frame.options import DATA_NAMES, TableOptions
from posterity.cli.frame.output import UsageError, log
from posterity.cli.frame.settings import LABELS, METHODS, Settings, settings
from posterity.cli.frame.sources import Source, is_file, read_source
from posterity.curvature import BlockDiagonal, CorrectedKronecker, Diagonal, Full, Kronecker, LowRank, Structure
from posterity.datasets import TOYS, DataSet, load
from posterity.errors import Diverged, unknown
from posterity.evidence import Evidence
from posterity.inference import Checkpoint, Method, Plan, Trace, infer, plan
from posterity.inference.memory import human
from posterity.likelihoods import Categorical, Gaussian, Likelihood
from posterity.methods import (
    HMC,
    MAP,
    NUTS,
    SGHMC,
    SGLD,
    SWAG,
    Conjugate,
    Ensemble,
    Laplace,
    MCDropout,
    MeanField,
    NaturalGradient,
    RMSprop,
)
from posterity.methods.parts.gradients import Estimator, Flipout, LocalReparameterisation, WeightSampling
from posterity.model import Joint, Tempering
from posterity.networks import MLP
from posterity.optim.optimizer import SGD, Adam
from posterity.optim.schedules import Cosine
from posterity.posteriors import Posterior
from posterity.priors import Normal
from posterity.storage.part import JSON

STRUCTURES: Mapping[str, type[Structure]] = MappingProxyType(
    {
        "full": Full,
        "corrected-kronecker": CorrectedKronecker,
        "kronecker": Kronecker,
        "block-diagonal": BlockDiagonal,
        "diagonal": Diagonal,
        "low-rank": LowRank,
    }
)
"""The words of --structure, those that keep most first."""

ESTIMATORS: Mapping[str, Estimator] = MappingProxyType(
    {
        "antithetic": WeightSampling(antithetic=True),
        "weights": WeightSampling(),
        "local": LocalReparameterisation(),
        "flipout": Flipout(),
    }
)
"""The words of --estimator, the default first."""


SETTINGS = (
    *("hidden", "activation", "steps", "batch_size", "step_size", "prior_scale", "noise", "temperature", "eta", "seed"),
    *("structure", "tune", "estimator", "kl_weight", "draws", "warmup", "chains"),
)
"""The options by which `settings` chooses, by name."""


RATE = 0.1  # of dropout, where none is given
DRAWS, CHAINS = 250, 4  # of samplers over all rows, likewise
MAX_DEPTH = 8  # of the trees of NUTS: weights that are not identified make for long trajectories
EXACT = ("nuts", "hmc")
SMALL = 10_000_000  # multiplications in one forward pass of a batch
NOISE_PRIOR = (0.0, 2.0)  # of the log noise, in units of standardised targets: wide, but a density


@dataclass(frozen=True, eq=False)
class Task:
    """A problem ready to run: its settings, where its data come from, the network and the joint."""

    settings: Settings
    source: Source
    network: MLP
    joint: Joint

    @property
    def data(self) -> DataSet:
        """The rows."""
        return self.source.data

    def config(self, method: str) -> dict[str, JSON]:
        """All that a run of `method` depends on, and what it takes to use its posterior, as JSON."""
        return {
            "data": self.settings.data,
            **self.source.config,  # first, so that a changed file is told before what follows from it
            **self.settings.config(),
            "method": method,
            "task": self.data.task,
            "classes": None if self.data.classes is None else list(self.data.classes),
            "network": self.network.config,
        }


def find_data(name: str, options: TableOptions, seed: int = 0) -> Source:
    """The data that the argument DATA names: a data set made on the spot, or a file, whose test rows the seed draws."""
    if is_file(name):
        return read_source(Path(name), options, seed)
    if name not in TOYS:
        raise UsageError(
            unknown("data set", name, TOYS),
            f"the data sets are {', '.join(DATA_NAMES)}; a file is given by its path, as in data.csv.",
        )
    if given := options.given():
        word = given[0].replace("_", "-")
        raise UsageError(f"--{word} is for files, and {name} is made on the spot.", f"leave --{word} out.")
    return Source(load(name))


def find_device(name: str) -> torch.device:
    """The device that --device names; `auto` is a CUDA device where there is one."""
    if name not in ("auto", "cpu", "cuda"):
        raise UsageError(unknown("device", name, ("auto", "cpu", "cuda")), "the devices are auto, cpu and cuda.")
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda was asked for, but torch sees no CUDA device.", "use --device cpu or auto.")
    found = name == "cuda" or (name == "auto" and torch.cuda.is_available())
    return torch.device("cuda" if found else "cpu")


def asked(words: Mapping[str, Any]) -> Task:
    """The problem that the options of `fit`, `compare` and `plan` describe, from their values by name."""
    options = TableOptions(
        words["target"],
        words["task_name"],
        tuple(words["drop"] or ()),
        tuple(words["category"] or ()),
        *(words[name] for name in ("separator", "decimal", "header", "encoding", "test_fraction")),
    )
    source = find_data(words["data"], options, words["seed"])
    chosen_by = {name: words[name] for name in SETTINGS}
    chosen_by["dropout"] = _rate(words)
    return make_task(settings(source, **chosen_by), source, find_device(words["device"]))


def _rate(words: Mapping[str, Any]) -> float | None:
    """The rate of dropout layers: None, so that the network has none, where no method is asked for that uses them."""
    names = (words.get("methods") or words["method"]).split(",")
    if "dropout" in (name.strip() for name in names):
        return RATE if words["dropout"] is None else float(words["dropout"])
    if words["dropout"] is not None:
        raise UsageError("--dropout is for the method dropout, which was not asked for.", "leave --dropout out.")
    return None


def make_task(chosen: Settings, source: Source, device: torch.device) -> Task:
    """The problem of these settings: a fully connected network that fits the data, and its joint."""
    data = source.data
    inputs = data.train.inputs.shape[1]
    outputs = data.train.targets.shape[1] if data.classes is None else len(data.classes)
    with torch.random.fork_rng(devices=[]):  # weights start from the seed; the caller's generator stays as it was
        torch.default_generator.manual_seed(chosen.seed)
        network = MLP((inputs, *chosen.hidden, outputs), activation=chosen.activation, dropout=chosen.dropout)
    network = network.to(device)
    cold = chosen.temperature != 1.0
    tempering = Tempering.cold(chosen.temperature) if cold else Tempering.tempered(chosen.eta)
    joint = Joint(network, _likelihood(chosen, source.scale), Normal(chosen.prior_scale), len(data.train), tempering)
    return Task(chosen, source, network, joint)


def make_method(stage: str, settings: Settings, joint: Joint) -> Method:
    """The method of one stage on this problem."""
    if stage in ("map", "ensemble"):
        adam = Adam(step_size=settings.step_size)
        fit = MAP(settings.steps, settings.batch_size, adam, Cosine())  # Adam comes to rest only if its steps do
        return fit if stage == "map" else Ensemble(fit)
    if stage == "dropout":
        return MCDropout(settings.steps, settings.batch_size, Adam(step_size=settings.step_size), Cosine())
    if stage == "natural-gradient":
        # Steps of ten times the size with a tenth for radius: as with Adam, a mean moves by the step size at most.
        step_size, points = 10 * settings.step_size, Adam(settings.step_size)
        return NaturalGradient(settings.steps, settings.batch_size, step_size, Cosine(), radius=0.1, optimizer=points)
    if stage == "swag":
        every = max(1, settings.steps // 100)
        rank = min(20, settings.steps // every)
        return SWAG(MAP(settings.steps, settings.batch_size, SGD(settings.step_size)), every, rank)
    if stage in ("sgld", "sghmc"):
        return _sampler(SGLD if stage == "sgld" else SGHMC, settings, joint)
    if stage in EXACT:
        draws, warmup, chains = settings.draws or DRAWS, settings.warmup or DRAWS, settings.chains or CHAINS
        return NUTS(draws, warmup, chains, max_depth=MAX_DEPTH) if stage == "nuts" else HMC(draws, warmup, chains)
    if stage == "conjugate":
        return Conjugate()
    if stage == "mean-field":
        estimator = ESTIMATORS[settings.estimator or next(iter(ESTIMATORS))]
        adam = Adam(step_size=settings.step_size)
        return MeanField(settings.steps, settings.batch_size, adam, Cosine(), estimator)
    structure = None if settings.structure is None else STRUCTURES[settings.structure]()
    # A noise that was given is known; only one that is to be learnt is tuned.
    return Laplace(structure=structure, tuning=Evidence(noise=settings.noise == "learn") if settings.tune else None)


def _sampler(kind: type[SGLD | SGHMC], settings: Settings, joint: Joint) -> Method:
    """Half of the steps are warm-up, the others give about 100 draws a chain; smaller steps than those of Adam."""
    later = max(1, settings.steps // 2)
    thin = max(1, later // 100)
    draws = later // thin
    size = kind.step_size_for((0.1 if kind is SGLD else 0.03) * settings.step_size, joint)
    return kind(
        draws=draws,
        warmup=max(1, settings.steps - draws * thin),
        step_size=float(size),
        batch_size=settings.batch_size,
        thin=thin,
        preconditioner=RMSprop(),  # noise that is learnt makes curvatures so different that no one step size suits
    )


def stage_joint(stage: str, task: Task) -> Joint:
    """The problem of one stage: that of the task, except that mean-field may have a weight of its KL of its own.

    A noise that nuts or hmc samples has a prior: flat, it would let networks that can fit every row go to no noise.
    """
    likelihood = task.joint.likelihood
    if stage in EXACT and isinstance(likelihood, Gaussian) and likelihood.learn:
        return replace(task.joint, likelihood=replace(likelihood, log_scale_prior=NOISE_PRIOR))
    eta = kl_weight(stage, task)
    return task.joint if eta is None else replace(task.joint, tempering=Tempering.tempered(eta))


def kl_weight(stage: str, task: Task) -> float | None:
    """What mean-field multiplies its KL with, other methods being left alone; None where the task is tempered.

    The default for classes is rows / (2 weights), at most 1: with more means and scales than rows the KL outweighs the
    data, and the optimum is near the prior. See `Tempering.balanced`, with means and scales as its units. It is 1
    for regression, where a power of the likelihood would only be taken for less noise.
    """
    chosen = task.settings
    if stage != "mean-field" or chosen.temperature != 1.0 or chosen.eta != 1.0:
        return None
    usual = 1.0 if task.data.classes is None else min(1.0, len(task.data.train) / (2 * task.joint.num_weights))
    return chosen.kl_weight or usual


def kl_weight_line(method: str, task: Task) -> str:
    """A sentence on the weight of the KL, where mean-field has one of its own that is not 1; else nothing."""
    weight = kl_weight(method, task)
    if weight is None or weight == 1.0:
        return ""
    counts = f"{len(task.data.train)} rows / {2 * task.joint.num_weights} means and scales"
    why = "--kl-weight" if task.settings.kl_weight else counts
    return f"{label(method)} weighs its KL by {weight:.4g} ({why}); --kl-weight 1 is the posterior itself."


def check_methods(names: tuple[str, ...], task: Task) -> None:
    """`UsageError` where a method cannot work on the task, before any other one has run."""
    settings = task.settings
    if "conjugate" in names and (task.data.classes is not None or settings.hidden or settings.noise == "learn"):
        raise UsageError(
            "conjugate needs regression with a linear model and known noise: the exact posterior is not known else.",
            "try the data set line, or --hidden none --noise 0.5.",
        )
    if "dropout" in names and not settings.hidden:
        raise UsageError("dropout needs hidden units to drop, and the model is linear.", "try --hidden 50.")
    if settings.structure is not None and "laplace" not in names:
        raise UsageError("--structure is for laplace, which was not asked for.", "leave --structure out.")
    for option in ("draws", "warmup", "chains"):
        if getattr(settings, option) is not None and not set(names) & set(EXACT):
            raise UsageError(
                f"--{option} is for {' and '.join(EXACT)}, which were not asked for.", f"leave --{option} out."
            )
    for option, value in (("--estimator", settings.estimator), ("--kl-weight", settings.kl_weight)):
        if value is not None and "mean-field" not in names:
            raise UsageError(f"{option} is for mean-field, which was not asked for.", f"leave {option} out.")
    stages(names, task)


def stages(names: tuple[str, ...], task: Task) -> dict[str, Method]:
    """Every stage of the methods once, in the order in which they run."""
    found = dict.fromkeys(stage for name in names for stage in METHODS[name])
    return {stage: make_method(stage, task.settings, task.joint) for stage in found}


def plans(names: tuple[str, ...], task: Task) -> dict[str, Plan]:
    """What every stage of the methods takes in memory."""
    methods = stages(names, task)
    return {stage: plan(method, task.joint, task.data.train.pair) for stage, method in methods.items()}


def check_memory(names: tuple[str, ...], task: Task) -> None:
    """`UsageError` where a stage takes more memory than there is, before any has run."""
    for found in plans(names, task).values():
        if not found.fits:
            assert found.memory is not None
            words = [word for word, kind in STRUCTURES.items() if f"structure={kind.__name__}()" in found.fitting]
            raise UsageError(
                f"{found.method} needs about {human(found.total)}, and {found.device} has {human(found.memory)}.",
                f"--structure {words[0]} fits." if words else "use a smaller network, --hidden 50, or fewer rows.",
            )


def check_figure_data(task: Task) -> None:
    """`UsageError` where no figure can be drawn of the task."""
    if not has_figure(task):
        wanted, count = _drawn_inputs(task), task.data.train.inputs.shape[1]
        raise UsageError(
            f"--figure draws {task.data.task} with {wanted} input{'s' * (wanted > 1)}. Got {count} ({task.data.name}).",
            "leave --figure out.",
        )


def has_figure(task: Task) -> bool:
    """Whether what is predicted can be drawn over the inputs: one of them for regression, two for classes."""
    return task.data.train.inputs.shape[1] == _drawn_inputs(task)


def _drawn_inputs(task: Task) -> int:
    return 1 if task.data.task == "regression" else 2


def describe(task: Task) -> str:
    """The network in a few words: `2-50-50-2 relu, 2802 weights`."""
    sizes = "-".join(str(size) for size in task.network.config["sizes"])
    activation = f" {task.settings.activation}" if task.settings.hidden else " linear"
    return f"{sizes}{activation}, {task.joint.num_weights} weights"


def label(method: str) -> str:
    """The name of a method as people write it."""
    return LABELS[method]


def _likelihood(settings: Settings, scale: float) -> Likelihood:
    """The noise is given in the units of the targets; the network sees them divided by `scale`."""
    if settings.noise is None:
        return Categorical()
    if isinstance(settings.noise, str):
        return Gaussian(scale=1.0, learn=True)
    return Gaussian(scale=settings.noise / scale)


@dataclass(frozen=True, eq=False)
class Stage:
    """What a stage gave, and the seconds it took in this process."""

    posterior: Posterior
    trace: Trace
    seconds: float


def run_stage(
    name: str, task: Task, start: Posterior | None, *, checkpoint: Checkpoint | None = None, quiet: bool = False
) -> Stage:
    """Run the stage `name` of the task, from the posterior of the stage before it."""
    begin = time.perf_counter()
    try:
        posterior, trace = infer(
            make_method(name, task.settings, task.joint),
            stage_joint(name, task),
            task.data.train.pair,
            start=start,
            seed=task.settings.seed,
            checkpoint=checkpoint,
            progress=not quiet and sys.stderr.isatty(),
        )
    except Diverged as error:
        smaller = f"--step-size than {task.settings.step_size:g}"
        error.add_note(f"try a smaller {'--prior-scale' if name in EXACT else smaller}.")
        raise
    seconds = time.perf_counter() - begin
    steps = (
        f", {int(trace.steps('loss')[-1])} steps, loss {float(trace['loss'][-1].mean()):.4f}" if "loss" in trace else ""
    )
    log(f"{label(name)}{steps}, {seconds:.1f} s", quiet=quiet)
    return Stage(posterior, trace, seconds)


def warm_up() -> None:
    """Let torch load now what its first Jacobian needs, about a second, which no method should be charged for."""
    torch.func.vmap(torch.func.jacrev(torch.square))(torch.ones(1))


@contextmanager
def fitting_threads(task: Task) -> Iterator[None]:
    """One thread for a small network, where threads wait for each other longer than they work.

    Somebody who sets OMP_NUM_THREADS is left alone.
    """
    threads = torch.get_num_threads()
    rows = task.settings.batch_size or len(task.data.train)
    if rows * task.joint.num_weights < SMALL and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
