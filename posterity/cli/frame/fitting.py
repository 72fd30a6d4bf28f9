"""Fits of methods by name, either the stages of a recipe or `auto`, and loading of the fitted models."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from posterity.cli.frame.executors import executor_named
from posterity.cli.frame.options import AUTO, SECONDS, MethodOption
from posterity.cli.frame.output import UsageError, log
from posterity.cli.frame.sources import Source, is_file
from posterity.cli.frame.tasks import filled, find_device, fitting_threads, run_stage, task_of, training_rows
from posterity.errors import BadFolder
from posterity.estimators.automatic import Stacked, fit_automatic
from posterity.networks import MLP
from posterity.options import flag
from posterity.posteriors import Posterior
from posterity.posteriors.load import load
from posterity.recipes.methods import RECIPES
from posterity.recipes.settings import Settings
from posterity.recipes.stages import threads
from posterity.storage.part import JSON

Model = Posterior | Stacked
OF_AUTO = ("seed", "class_weight")  # the settings that auto reads
UNITS = 50  # assumed width of auto's networks, for the number of threads


@dataclass(frozen=True)
class Fitter:
    """A method with its settings, to be fitted to any rows; `note` tells the user which method was chosen for them."""

    method: str
    settings: Settings
    seconds: float
    device: str
    note: str = ""
    executor: str | None = None

    def fit(self, source: Source) -> tuple[Model, dict[str, JSON] | None]:
        """Fit the training rows; return the model and the configuration of its network, None for `auto`."""
        if self.method == AUTO:
            return self.automatic(source, quiet=False), None
        task, posterior = task_of(source, (self.method,), self.settings, self.device), None
        with fitting_threads(task):
            for stage in RECIPES[self.method].stages:
                posterior = run_stage(stage, task, posterior, quiet=True).posterior
        assert posterior is not None
        return posterior, task.network.config

    def automatic(self, source: Source, *, quiet: bool = True) -> Stacked:
        """Fit the training rows by `auto`, with a progress bar on a terminal."""
        data, fitted = source.data, source.preprocessing
        inputs, targets, *weights = training_rows(filled(self.settings, source, ()), data)
        plain = data.classes is None and fitted is not None
        with threads(inputs.numel() * UNITS):
            return fit_automatic(
                inputs,
                targets,
                data.task,
                classes=len(data.classes or ()),
                mean=(source.shift,) if plain else (),
                scale=(source.scale,) if plain else (),
                weights=weights[0] if weights else None,
                seconds=self.seconds,
                seed=self.settings.seed,
                device=find_device(self.device),
                executor=executor_named(self.executor),
                progress=False if quiet else None,
                **source.by,
            )

    def auto_config(self, source: Source) -> dict[str, JSON]:
        """Return as JSON all settings that determine a run of `auto`, and the facts that loading it needs."""
        classes = source.data.classes
        return {
            "data": source.data.name,
            **source.config,
            **{name: getattr(self.settings, name) for name in OF_AUTO},
            "seconds": self.seconds,
            "method": AUTO,
            "task": source.data.task,
            "classes": None if classes is None else list(classes),
            "inputs": source.data.train.inputs.shape[1],
        }


def not_for_auto(settings: Settings, *, log_target: bool) -> list[str]:
    """Return the flags of options that differ from their defaults and that auto does not read."""
    plain = Settings()
    others = [f.name for f in fields(settings) if getattr(settings, f.name) != getattr(plain, f.name)]
    return [flag(name) for name in (*others, *["log_target"] * log_target) if name not in OF_AUTO]


def check_auto(settings: Settings, *, log_target: bool) -> None:
    """Raise a `UsageError` for an option that auto does not read."""
    if log_target:
        raise UsageError(
            "--log-target is not for auto, which itself models the logarithm of a skewed target above 0, among others.",
            "leave --log-target out, or name another method, such as laplace.",
        )
    if others := not_for_auto(settings, log_target=log_target):
        raise UsageError(
            f"{others[0]} is for methods that fit one network, and auto chooses what it fits.",
            f"leave {others[0]} out, or name another method, such as laplace.",
        )


def make_fitter(
    data: str, option: MethodOption, settings: Settings, device: str, executor: str | None, *, log_target: bool
) -> Fitter:
    """Return the named method with its settings, or the default one; raise a `UsageError` for unsuitable options.

    The default for files is `auto`, unless an option is given that it does not read.
    """
    others = not_for_auto(settings, log_target=log_target)
    method, note = option.method, ""
    if method is None:
        method = AUTO if is_file(data) and not others else "laplace"
        if is_file(data):
            why = f", as {others[0]} is given, which auto does not take" if others else "; --method names another"
            note = f"The method is {method}{why}."
    if method == AUTO:
        check_auto(settings, log_target=log_target)
    if method != AUTO and option.seconds is not None:
        raise UsageError(
            f"--seconds is the budget of auto, and the method is {method}.",
            "leave --seconds out, or use --method auto.",
        )
    return Fitter(method, settings, option.seconds or SECONDS, device, note, executor)


def timed_automatic(fitter: Fitter, source: Source, *, quiet: bool) -> tuple[Stacked, float]:
    """Fit the training rows by `auto`; return the model and the seconds, which are logged."""
    begin = time.perf_counter()
    model = fitter.automatic(source, quiet=quiet)
    seconds = time.perf_counter() - begin
    log(f"{AUTO}, {seconds:.1f} s", quiet=quiet)
    return model, seconds


def stored_model(path: Path, config: Mapping[str, Any], network: Mapping[str, Any] | None) -> Model:
    """Load the model of a run folder, rebuilding its network; raise BadFolder if it does not fit the run."""
    if network is None:
        model = Stacked.load(path)
        wanted = (config["inputs"], len(config["classes"] or ()))
        if (model.columns, model.classes) != wanted:
            raise BadFolder("Its inputs or classes belong to another run. Fit it anew.")
        return model
    try:
        module = MLP(**network)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise BadFolder(f"It does not describe a network ({error}). Fit it anew.") from error
    return load(path, module)
