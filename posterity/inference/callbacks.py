"""Callbacks of a run: validation, early stopping, a progress bar."""

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from posterity.errors import positive_whole, shown
from posterity.inference.run import Run
from posterity.processes import writes
from posterity.storage import clone


class Callback:
    """Hooks that `infer` calls around the steps of a run; each may be left out.

    A callback that depends on earlier steps returns that memory from `state`; checkpoints store it for `restore`.
    """

    def start(self, run: Run) -> None:
        """Called before the first step, or after a resume."""

    def after_step(self, run: Run) -> None:
        """Called after every step."""

    def end(self, run: Run) -> None:
        """Called after the last step, before the posterior is made; also when the run fails."""

    def state(self) -> Any:
        """Return what an exact resume needs, as nested tensors and numbers; None for a callback without memory."""
        return None

    def template(self, run: Run) -> Any:
        """Return the structure of a stored `state`: its NamedTuples and the devices of its tensors."""
        return self.state()

    def restore(self, state: Any) -> None:
        """Continue from a stored `state`."""


class EachStep(Callback):
    """Calls a function of the run after every step; it may set `run.stopped` to the reason to stop.

    `infer(..., callbacks=[function])` makes one of each plain function.
    """

    def __init__(self, function: Callable[[Run], object]) -> None:
        self._function = function

    def after_step(self, run: Run) -> None:
        self._function(run)


def as_callbacks(given: object) -> list[Callback]:
    """Return callbacks as they are, and plain functions of the run as callbacks; raises a TypeError for the rest."""
    if not isinstance(given, Sequence):
        raise TypeError(f"infer: callbacks must be a list of callbacks. Got {shown(given)}. Put it in a list.")
    callbacks: list[Callback] = []
    for callback in given:
        if isinstance(callback, type) or not (isinstance(callback, Callback) or callable(callback)):
            hint = f" Call it: {callback.__name__}()." if isinstance(callback, type) else ""
            raise TypeError(
                "infer: callbacks must be a list of callbacks, or of functions of the run. "
                f"Got {shown(callback)} in it.{hint}"
            )
        callbacks.append(callback if isinstance(callback, Callback) else EachStep(callback))
    return callbacks


class Validation(Callback):
    """Records "validation_nll", the mean negative log-likelihood of the validation rows, every `every` steps.

    The last step is recorded too, also where a run stops early. A run with members has a number for each.
    """

    def __init__(self, every: int) -> None:
        positive_whole("Validation.every", every)
        self.every = every

    def start(self, run: Run) -> None:
        _needs_validation(self, run)

    def after_step(self, run: Run) -> None:
        if run.validate is not None and (run.step % self.every == 0 or run.step == run.steps or run.stopped):
            run.trace.record(run.step, {"validation_nll": run.validate(run.latest())})


_NO_VALIDATION = {"best": math.inf, "best_step": 0, "looks": 0, "best_state": None}


class EarlyStopping(Callback):
    """Stops when "validation_nll" has not improved for `patience` validations, and restores the best state.

    An improvement counts if it is larger than `least` nats per row.
    """

    def __init__(self, patience: int = 10, least: float = 0.0) -> None:
        positive_whole("EarlyStopping.patience", patience)
        if not math.isfinite(least) or least < 0:
            raise ValueError(f"EarlyStopping.least must be a finite number of at least 0. Got {least!r}.")
        self.patience, self.least = patience, least
        self._memory: dict[str, Any] = _NO_VALIDATION

    def start(self, run: Run) -> None:
        _needs_validation(self, run)
        if run.step == 0:  # the callback may have served an earlier run
            self._memory = _NO_VALIDATION

    def after_step(self, run: Run) -> None:
        if run.trace.last_step("validation_nll") != run.step:
            return
        latest = run.trace.recent("validation_nll", 1)[0]
        if latest.dim():
            raise ValueError(
                f"EarlyStopping stops one run, and this one has {len(latest)} members. "
                "Fit them one by one, or leave it out."
            )
        value = float(latest)
        if value < self._memory["best"] - self.least:
            self._memory = {"best": value, "best_step": run.step, "looks": 0, "best_state": clone(run.state)}
        else:
            self._memory = {**self._memory, "looks": self._memory["looks"] + 1}
            if self._memory["looks"] >= self.patience:
                run.stopped = f"validation did not improve after step {self._memory['best_step']}"

    def end(self, run: Run) -> None:
        if self._memory["best_state"] is not None:
            run.state = self._memory["best_state"]

    def state(self) -> Any:
        return self._memory

    def template(self, run: Run) -> Any:
        return {**self._memory, "best_state": run.state}

    def restore(self, state: Any) -> None:
        self._memory = state


class ProgressBar(Callback):
    """Shows a bar on standard error with the loss and the remaining time, ten times a second. Needs `rich`."""

    def __init__(self) -> None:
        self._progress: Any = None
        self._shown = 0.0

    def start(self, run: Run) -> None:
        from rich.progress import TextColumn

        self._progress = _rich_bar(TextColumn("{task.fields[loss]}"))
        self._progress.start()
        self._task = self._progress.add_task(type(run.method).__name__, total=run.steps, completed=run.step, loss="")

    def after_step(self, run: Run) -> None:
        now = time.monotonic()
        if now - self._shown < 0.1 and run.step < run.steps:  # reading the loss waits for the device
            return
        self._shown = now
        loss = f"loss {float(run.trace.recent('loss', 1).mean()):.4f}" if "loss" in run.trace else ""
        self._progress.update(self._task, completed=run.step, loss=loss)

    def end(self, run: Run) -> None:
        self._progress.stop()


@contextmanager
def bar(name: str, total: int, completed: int, wanted: bool | None) -> Iterator[Callable[[], None]]:
    """Show a bar on standard error while many things are done; calling what it gives advances it by one.

    `wanted` None: where `shows_progress` says so.
    """
    if not shows_progress(wanted):
        yield lambda: None
        return
    with _rich_bar() as progress:
        task = progress.add_task(name, total=total, completed=completed)
        yield lambda: progress.advance(task)


def shows_progress(wanted: bool | None) -> bool:
    """Return whether to show a bar: as wanted, or for None if standard error is a terminal and rich is there."""
    return writes() and (wanted or (wanted is None and sys.stderr.isatty() and find_spec("rich") is not None))


def _rich_bar(*further: Any) -> Any:
    """Return a progress bar on standard error with these further columns before the remaining time."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=32),
        MofNCompleteColumn(),
        *further,
        TimeRemainingColumn(),
        console=Console(file=sys.stderr),
        transient=True,
    )


def _needs_validation(callback: Callback, run: Run) -> None:
    if run.validate is None:
        raise ValueError(
            f"{type(callback).__name__} needs validation data. Pass infer(..., validation=(inputs, targets))."
        )
