"""Callbacks of a run: validation, early stopping, a progress bar."""

import math
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from multiprocessing import parent_process
from typing import Any, TypeVar

from posterity.errors import positive_whole, shown
from posterity.inference.run import Run
from posterity.processes import writes
from posterity.storage import clone

T = TypeVar("T")

MOST = 0.8  # of a thing under way that the first bar inside stands for, as more may follow


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
    """Shows a bar on standard error with the loss and the remaining time, ten times a second. Needs `rich`.

    Where a bar is open already, as one of many fits, it moves that one.
    """

    def __init__(self) -> None:
        self._progress: Any = None
        self._inside: Bar | None = None
        self._shown = 0.0

    def start(self, run: Run) -> None:
        if _open:
            self._inside = _open[-1].within(run.steps, run.step)
            return
        from rich.progress import TextColumn

        self._progress = _rich_bar(TextColumn("{task.fields[loss]}"))
        self._progress.start()
        self._task = self._progress.add_task(type(run.method).__name__, total=run.steps, completed=run.step, loss="")

    def after_step(self, run: Run) -> None:
        now = time.monotonic()
        if now - self._shown < 0.1 and run.step < run.steps:  # reading the loss waits for the device
            return
        self._shown = now
        if self._inside is not None:
            self._inside.reach(run.step)
            return
        loss = f"loss {float(run.trace.recent('loss', 1).mean()):.4f}" if "loss" in run.trace else ""
        self._progress.update(self._task, completed=run.step, loss=loss)

    def end(self, run: Run) -> None:
        if self._progress is not None:
            self._progress.stop()


class Bar:
    """How much of many things is done, one after the other; a bar inside moves it by parts of the one under way."""

    def __init__(self, completed: float, move: Callable[[float], object]) -> None:
        self._done, self._move = completed, move
        self._under_way = 0.0

    def advance(self, by: float = 1.0) -> None:
        """Say that so much more is done."""
        self._done, self._under_way = self._done + by, 0.0
        self._move(self._done)

    def reach(self, completed: float) -> None:
        """Say that so much is done in all, unless it was more already."""
        if completed > self._done:
            self.advance(completed - self._done)

    def within(self, total: float, completed: float, share: float | None = None) -> "Bar":
        """Return a bar for parts of the thing under way, by default most of what is left of it: others may follow."""
        begun, at = self._under_way, self._done
        share = MOST * (1.0 - begun) if share is None else share

        def move(done: float) -> None:
            if self._done == at:
                self._under_way = begun + share * min(1.0, done / max(total, 1e-9))
                self._move(self._done + self._under_way)

        return Bar(completed, move)


_open: list[Bar] = []  # the bar on the screen, or the one that keeps others from it; then those inside


@contextmanager
def bar(
    name: str,
    total: float,
    completed: float = 0.0,
    wanted: bool | None = None,
    *,
    share: float | None = None,
    in_seconds: bool = False,
) -> Iterator[Bar]:
    """Show a bar with the remaining time on standard error while many things are done, and give it.

    `wanted` None: where `shows_progress` says so; False: neither this bar nor any inside. A bar inside another moves
    that one, by `share` or as `Bar.within` says. `in_seconds` says that the total is of seconds, on some machine.
    """
    with ExitStack() as stack:
        if _open:
            own = _open[-1].within(total, completed, share)
        elif shows_progress(wanted):
            display = stack.enter_context(_rich_bar(in_seconds=in_seconds))
            task = display.add_task(name, total=total, completed=completed)
            own = Bar(completed, lambda done: display.update(task, completed=done))
        else:
            own = Bar(completed, lambda done: None)
            if wanted is None:
                yield own
                return
        _open.append(own)
        stack.callback(_open.pop)
        yield own


def tracked(items: Collection[T], name: str, share: float | None = None) -> Iterator[T]:
    """Yield the items, under a bar that moves when each is done."""
    with bar(name, len(items), share=share) as shown:
        for item in items:
            yield item
            shown.advance()


def moves_bar() -> bool:
    """Return whether a bar is open, which a run inside can move."""
    return bool(_open)


def shows_progress(wanted: bool | None) -> bool:
    """Return whether to show a bar: as wanted, or for None on a terminal if rich is there, in no worker.

    While one is open there is no other.
    """
    if _open or not writes():
        return False
    return bool(wanted) or (
        wanted is None and sys.stderr.isatty() and parent_process() is None and find_spec("rich") is not None
    )


def _rich_bar(*further: Any, in_seconds: bool = False) -> Any:
    """Return a progress bar on standard error with these further columns before the remaining time."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        Task,
        TaskProgressColumn,
        TextColumn,
    )
    from rich.text import Text

    class TimeLeft(ProgressColumn):
        """The time left, as the last news had it, less what has gone by since; without news the time so far."""

        news: tuple[float, float, float] = (-1.0, 0.0, 0.0)  # completed, when, and the time left then

        def render(self, task: Task) -> Text:
            now, left = task.get_time(), task.time_remaining
            if left is None and in_seconds:
                left = task.remaining
            if left is not None and task.completed != self.news[0]:
                self.news = task.completed, now, left
            left = self.news[2] - (now - self.news[1])
            return Text(f"{_clock(left)} left" if left > 0 else f"{_clock(task.elapsed or 0.0)} so far", "dim")

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TaskProgressColumn() if in_seconds else MofNCompleteColumn(),
        *further,
        TimeLeft(),
        console=Console(file=sys.stderr),
        transient=True,
        speed_estimate_period=3600.0,  # seconds: some things take minutes
    )


def _clock(seconds: float) -> str:
    """Return a time as minutes and seconds, or hours, minutes and seconds.

    >>> _clock(7.0), _clock(3725.0)
    ('0:07', '1:02:05')
    """
    minutes, left = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{left:02}" if hours else f"{minutes}:{left:02}"


def _needs_validation(callback: Callback, run: Run) -> None:
    if run.validate is None:
        raise ValueError(
            f"{type(callback).__name__} needs validation data. Pass infer(..., validation=(inputs, targets))."
        )
