"""Tasks of the command line: the network and joint for a source of rows, checks of options, and runs of stages."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch

from posterity.cli.frame.options import ReadingOptions, TableOptions
from posterity.cli.frame.output import UsageError, log
from posterity.cli.frame.sources import Source, find_data
from posterity.datasets import DataSet
from posterity.errors import Diverged, unknown
from posterity.inference import Checkpoint, Method, Plan, Trace, infer, plan
from posterity.inference.memory import human
from posterity.likelihoods import Categorical, Gaussian, Heteroscedastic, Likelihood
from posterity.model import Joint, Tempering
from posterity.model.module import seeded
from posterity.networks import MLP
from posterity.options import as_json, flag
from posterity.posteriors import Posterior
from posterity.priors import Normal
from posterity.recipes.methods import RECIPES, STEP_SIZE, owners
from posterity.recipes.settings import RATE, STRUCTURES, Settings
from posterity.recipes.stages import threads, usual_kl_weight
from posterity.storage.part import JSON

HIDDEN = MappingProxyType({"line": (), "sine": (50,), "waves": (50,)})
"""Default hidden layers of built-in data sets that need less than two layers of 50."""


@dataclass(frozen=True, eq=False)
class Task:
    """A problem ready to run: settings, source of rows, network and joint."""

    settings: Settings
    source: Source
    network: MLP
    joint: Joint

    @property
    def data(self) -> DataSet:
        """The data set of the source."""
        return self.source.data

    @property
    def rows(self) -> tuple[torch.Tensor, ...]:
        """The training rows as `infer` takes them."""
        return training_rows(self.settings, self.data)

    @property
    def options(self) -> dict[str, JSON]:
        """The options with what was chosen for those left out, as JSON."""
        rate = self.settings.dropout or 0.0
        # The file comes first, so that a changed file is reported before settings that follow from it.
        return {"data": self.data.name, **self.source.config, **as_json(self.settings), "dropout": rate}

    def config(self, method: str) -> dict[str, JSON]:
        """Return as JSON all settings that determine a run of `method`, and the facts that loading it needs."""
        return {
            **self.options,
            "method": method,
            "task": self.data.task,
            "classes": None if self.data.classes is None else list(self.data.classes),
            "network": self.network.config,
        }


def find_device(name: str) -> torch.device:
    """Return the device of --device; `auto` is a CUDA device if there is one."""
    if name not in ("auto", "cpu", "cuda"):
        raise UsageError(unknown("device", name, ("auto", "cpu", "cuda")), "the devices are auto, cpu and cuda.")
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda was asked for, but torch sees no CUDA device.", "use --device cpu or auto.")
    return torch.device("cpu" if name == "cpu" or not torch.cuda.is_available() else "cuda")


def make_task(
    data: str,
    methods: tuple[str, ...],
    settings: Settings,
    columns: TableOptions,
    reading: ReadingOptions,
    device: str,
    *,
    figure: bool = False,
) -> Task:
    """Return the task that the options describe; see `task_of`."""
    return task_of(find_data(data, columns, reading, settings.seed), methods, settings, device, figure=figure)


def task_of(source: Source, methods: tuple[str, ...], settings: Settings, device: str, *, figure: bool = False) -> Task:
    """Return the task of these rows: a fully connected network for the data, and its joint.

    Raise a `UsageError` if a method cannot work on it, or a wanted `figure` cannot be drawn. Without methods the
    network is linear, as nothing is fitted.
    """
    if not methods:
        settings = replace(settings, hidden=())
    chosen = filled(settings, source, methods)
    target = find_device(device)
    _check_options(methods, chosen)
    if figure:
        _check_figure(source.data)
    if settings.hidden is None and source.path is not None and "dropout" not in methods:
        from posterity.recipes.choice import sufficient

        def joint_with(hidden: tuple[int, ...]) -> Joint:
            return _problem(replace(chosen, hidden=hidden, dropout=None), source, target)[1]

        assert chosen.hidden is not None
        hidden, why = sufficient(joint_with, chosen.hidden, training_rows(chosen, source.data))
        if not hidden:
            why = f"{why[:-1]}; --hidden {','.join(map(str, chosen.hidden))} takes these."
        chosen, source = replace(chosen, hidden=hidden), replace(source, notes=(*source.notes, why))
    network, joint = _problem(chosen, source, target)
    task = Task(chosen, source, network, joint)
    _check_methods(methods, task)
    return task


def _problem(chosen: Settings, source: Source, device: torch.device) -> tuple[MLP, Joint]:
    """The network and joint of these settings."""
    rows = source.data
    outputs = rows.train.targets.shape[1] if rows.classes is None else len(rows.classes)
    outputs *= 2 if chosen.noise == "inputs" else 1  # the logarithm of the noise beside the mean
    sizes = (rows.train.inputs.shape[1], *(chosen.hidden or ()), outputs)
    with seeded(chosen.seed):
        network = MLP(sizes, activation=chosen.activation, dropout=chosen.dropout or 0.0)
    network = network.to(device)
    cold = chosen.temperature != 1.0
    tempering = Tempering.cold(chosen.temperature) if cold else Tempering.tempered(chosen.eta)
    prior = Normal() if chosen.prior_scale is None else Normal(chosen.prior_scale)
    return network, Joint(network, _likelihood(chosen, source.scale), prior, len(rows.train), tempering)


def filled(settings: Settings, source: Source, methods: tuple[str, ...]) -> Settings:
    """Return the settings with defaults for the data and the methods in place of options that were left out."""
    data, is_file, noise = source.data, source.path is not None, settings.noise
    if data.task == "classification" and noise is not None:
        raise UsageError(f"--noise is for regression, and {data.name} has classes.", "leave --noise out.")
    if data.task == "regression" and settings.class_weight is not None:
        raise UsageError(f"--class-weight is for classes, and {data.name} has numbers.", "leave --class-weight out.")
    if data.task == "regression" and noise is None:
        noise = 0.5 if data.name == "line" and not is_file else "learn"
    usual = (50,) if is_file else HIDDEN.get(data.name, (50, 50))
    return replace(
        settings,
        hidden=usual if settings.hidden is None else settings.hidden,
        noise=noise,
        dropout=RATE if "dropout" in methods and settings.dropout is None else settings.dropout,
    )


def training_rows(settings: Settings, data: DataSet) -> tuple[torch.Tensor, ...]:
    """Return inputs and targets; with --class-weight balanced also row weights, N / (classes x rows of the class)."""
    if settings.class_weight is None:
        return data.train.pair
    counts = torch.bincount(data.train.targets)
    weights = len(data.train) / (counts > 0).sum() / counts
    return (*data.train.pair, weights[data.train.targets].to(data.train.inputs.dtype))


def stage_joint(stage: str, task: Task) -> Joint:
    """Return the joint of a stage: the task's own, tempered where mean-field weighs its KL."""
    eta = kl_weight(stage, task)
    return task.joint if eta is None else replace(task.joint, tempering=Tempering.tempered(eta))


def kl_weight(stage: str, task: Task) -> float | None:
    """Return the factor of mean-field's KL; None for other methods, and for a task with a temperature."""
    chosen = task.settings
    if stage != "mean-field" or chosen.temperature != 1.0 or chosen.eta != 1.0:
        return None
    return chosen.kl_weight or usual_kl_weight(task.joint, classifies=task.data.classes is not None)


def kl_weight_line(method: str, task: Task) -> str:
    """Describe the factor of mean-field's KL in a sentence; "" if it is 1 or None."""
    weight = kl_weight(method, task)
    if weight is None or weight == 1.0:
        return ""
    counts = f"{len(task.data.train)} rows / {2 * task.joint.num_weights} means and scales"
    why = "--kl-weight" if task.settings.kl_weight else counts
    return f"{RECIPES[method].label} weighs its KL by {weight:.4g} ({why}); --kl-weight 1 is the posterior itself."


def _check_options(names: tuple[str, ...], settings: Settings) -> None:
    """Raise a `UsageError` for an option of methods that are not run."""
    for name, value in as_json(settings).items():
        if value is not None and (words := owners(name)) and not set(words) & set(names):
            *others, last = (f"the method {word}" if word == name else word for word in words)
            listed = f"{', '.join(others)} and {last}, which were" if others else f"{last}, which was"
            raise UsageError(f"{flag(name)} is for {listed} not asked for.", f"leave {flag(name)} out.")


def _check_methods(names: tuple[str, ...], task: Task) -> None:
    """Raise a `UsageError` if a method cannot work on the task."""
    settings = task.settings
    if "conjugate" in names and (task.data.classes is not None or settings.hidden or isinstance(settings.noise, str)):
        raise UsageError(
            "conjugate needs regression with a linear model and known noise: the exact posterior is not known else.",
            "try the data set line, or --hidden none --noise 0.5.",
        )
    outputs = task.data.train.targets.shape[1] if task.data.classes is None else len(task.data.classes) - 1
    if "ep" in names and (settings.hidden or settings.noise == "inputs" or outputs > 1):
        raise UsageError(
            "ep needs a linear model of one target or two classes: each row then depends on one number.",
            "try --hidden none.",
        )
    smooth = settings.hidden and settings.activation != "relu"
    if "pbp" in names and (smooth or task.joint.likelihood.link != "identity" or task.data.train.targets.shape[1] > 1):
        raise UsageError(
            "pbp needs regression of one target with equal noise in all rows, and ReLUs between the layers.",
            "try the data set sine, with --activation relu.",
        )
    if "dropout" in names and not settings.hidden:
        raise UsageError("dropout needs hidden units to drop, and the model is linear.", "try --hidden 50.")
    stages(names, task)


def stages(names: tuple[str, ...], task: Task) -> dict[str, Method]:
    """Return each stage of the methods once, in the order of the runs."""
    words = dict.fromkeys(stage for name in names for stage in RECIPES[name].stages)
    return {word: RECIPES[word].make(task.settings, task.joint) for word in words}


def plans(names: tuple[str, ...], task: Task, world_size: int = 1) -> dict[str, Plan]:
    """Plan the memory and time of each stage of the methods, on each of `world_size` devices."""
    methods = stages(names, task)
    return {stage: plan(method, task.joint, task.rows, world_size=world_size) for stage, method in methods.items()}


def check_memory(names: tuple[str, ...], task: Task) -> None:
    """Raise a `UsageError` if a stage needs more memory than there is, before any has run."""
    for needed in plans(names, task).values():
        if not needed.fits:
            assert needed.memory is not None
            words = [word for word, name in STRUCTURES.items() if f"structure={name}()" in needed.fitting]
            raise UsageError(
                f"{needed.method} needs about {human(needed.total)}, and {needed.device} has {human(needed.memory)}.",
                f"--structure {words[0]} fits." if words else "use a smaller network, --hidden 50, or fewer rows.",
            )


def _check_figure(data: DataSet) -> None:
    """Raise a `UsageError` if no figure can be drawn of the data."""
    if not has_figure(data):
        wanted, count = _drawn_inputs(data), data.train.inputs.shape[1]
        raise UsageError(
            f"--figure draws {data.task} with {wanted} input{'s' * (wanted > 1)}. Got {count} ({data.name}).",
            "leave --figure out.",
        )


def has_figure(data: DataSet) -> bool:
    """Return whether predictions can be drawn over the inputs: one input for regression, two for classes."""
    return data.train.inputs.shape[1] == _drawn_inputs(data)


def _drawn_inputs(data: DataSet) -> int:
    return 1 if data.task == "regression" else 2


def describe(task: Task) -> str:
    """Describe the network, as in `2-50-50-2 relu, 2802 weights`."""
    sizes = "-".join(str(size) for size in task.network.config["sizes"])
    activation = f" {task.settings.activation}" if task.settings.hidden else " linear"
    return f"{sizes}{activation}, {task.joint.num_weights} weights"


def _likelihood(settings: Settings, scale: float) -> Likelihood:
    """Return the likelihood; the given noise is in units of the file, in which the targets' unit is `scale`."""
    if settings.noise is None:
        return Categorical()
    if settings.noise == "inputs":
        return Heteroscedastic()
    if isinstance(settings.noise, str):
        return Gaussian()
    return Gaussian(scale=settings.noise / scale)


@dataclass(frozen=True, eq=False)
class Stage:
    """The posterior and trace of a stage, and its seconds in this process."""

    posterior: Posterior
    trace: Trace
    seconds: float

    def say(self, label: str, *, quiet: bool) -> None:
        """Print on standard error that the stage is finished."""
        trace, did = self.trace, ""
        if "loss" in trace:
            did = f", {int(trace.steps('loss')[-1])} steps, loss {float(trace['loss'][-1].mean()):.4f}"
        log(f"{label}{did}, {self.seconds:.1f} s", quiet=quiet)


def run_stage(
    name: str, task: Task, start: Posterior | None, *, checkpoint: Checkpoint | None = None, quiet: bool = False
) -> Stage:
    """Run the stage `name` of the task, from the posterior of the stage before it."""
    begin = time.perf_counter()
    try:
        posterior, trace = infer(
            RECIPES[name].make(task.settings, task.joint),
            stage_joint(name, task),
            task.rows,
            start=start,
            seed=task.settings.seed,
            checkpoint=checkpoint,
            progress=not quiet and sys.stderr.isatty(),
        )
    except Diverged as error:
        smaller = f"--step-size than {task.settings.step_size or STEP_SIZE:g}"
        error.add_note(f"try a smaller {'--prior-scale' if RECIPES[name].samples_all_rows else smaller}.")
        raise
    stage = Stage(posterior, trace, time.perf_counter() - begin)
    stage.say(RECIPES[name].label, quiet=quiet)
    return stage


def warm_up() -> None:
    """Compute a Jacobian once: torch's first takes about a second, which no method's seconds should include."""
    torch.func.vmap(torch.func.jacrev(torch.square))(torch.ones(1))


@contextmanager
def fitting_threads(task: Task) -> Iterator[None]:
    """Choose the number of threads inside the context by the size of the problem; see `threads`."""
    given = task.settings.batch_size
    rows = given if isinstance(given, int) else len(task.data.train)
    with threads(rows * task.joint.num_weights):
        yield
