"""What can be done after every step of a run."""

import math
import sys
import time
from typing import Any

from posterity.errors import positive_whole
from posterity.inference.run import Run
from posterity.storage import clone


class Callback:
    """Called by `infer` around the steps of a run; every hook may be left out.

    A callback that goes by the past keeps it in `state`, which checkpoints store and hand back to `restore`.
    """

    def start(self, run: Run) -> None:
        """Before the first step of this session, after a resume."""

    def after_step(self, run: Run) -> None:
        """After every step."""

    def end(self, run: Run) -> None:
        """After the last step, before the posterior is made; also when the run fails."""

    def state(self) -> Any:
        """What a resumed run needs to go on exactly (a nest of tensors and numbers); None if there never is any."""
        return None

    def template(self, run: Run) -> Any:
        """What a stored `state` looks like: its NamedTuples, and where its tensors are. Before `restore`."""
        return self.state()

    def restore(self, state: Any) -> None:
        """Take up a stored `state`."""


class Validation(Callback):
    """Records "validation_nll", the mean negative log-likelihood of the validation rows, `every` so many steps.

    The last step is recorded too, also that of a run that ends of its own accord. A run with members has one number for
    each.
    """

    def __init__(self, every: int) -> None:
        """Look every so many steps."""
        positive_whole("Validation.every", every)
        self.every = every

    def start(self, run: Run) -> None:
        _needs_validation(self, run)

    def after_step(self, run: Run) -> None:
        if run.validate is not None and (run.step % self.every == 0 or run.step == run.steps or run.stopped):
            run.trace.record(run.step, {"validation_nll": run.validate(run.latest())})


class EarlyStopping(Callback):
    """Stops when "validation_nll" has not improved for `patience` looks, and goes back to the best state.

    Takes the number of looks to wait and the least improvement, in nats per row, that counts.
    """

    def __init__(self, patience: int = 10, least: float = 0.0) -> None:
        """Wait `patience` looks for an improvement of more than `least`."""
        positive_whole("EarlyStopping.patience", patience)
        if not math.isfinite(least) or least < 0:
            raise ValueError(f"EarlyStopping.least must be a finite number of at least 0. Got {least!r}.")
        self.patience = patience
        self.least = least
        self._begin()

    def _begin(self) -> None:
        self._best, self._best_step, self._looks = math.inf, 0, 0
        self._best_state: Any = None

    def start(self, run: Run) -> None:
        _needs_validation(self, run)
        if run.step == 0:  # what an earlier run left behind is not this run's
            self._begin()

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
        if value < self._best - self.least:
            self._best, self._best_step, self._looks = value, run.step, 0
            self._best_state = clone(run.state)
        else:
            self._looks += 1
            if self._looks >= self.patience:
                run.stopped = f"validation did not improve after step {self._best_step}"

    def end(self, run: Run) -> None:
        if self._best_state is not None:
            run.state = self._best_state

    def state(self) -> Any:
        return {"best": self._best, "best_step": self._best_step, "looks": self._looks, "best_state": self._best_state}

    def template(self, run: Run) -> Any:
        return {**self.state(), "best_state": run.state}

    def restore(self, state: Any) -> None:
        self._best, self._best_step, self._looks = state["best"], state["best_step"], state["looks"]
        self._best_state = state["best_state"]


class ProgressBar(Callback):
    """A bar on standard error with the loss and the time left. Needs `rich`; refreshes ten times a second."""

    def __init__(self) -> None:
        """A bar that is drawn when the run starts."""
        self._progress: Any = None
        self._shown = 0.0

    def start(self, run: Run) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=32),
            MofNCompleteColumn(),
            TextColumn("{task.fields[loss]}"),
            TimeRemainingColumn(),
            console=Console(file=sys.stderr),
            transient=True,
        )
        self._progress.start()
        self._task = self._progress.add_task(type(run.method).__name__, total=run.steps, completed=run.step, loss="")

    def after_step(self, run: Run) -> None:
        """Move on, at most ten times a second: reading the loss waits for the device."""
        now = time.monotonic()
        if now - self._shown < 0.1 and run.step < run.steps:
            return
        self._shown = now
        loss = f"loss {float(run.trace.recent('loss', 1).mean()):.4f}" if "loss" in run.trace else ""
        self._progress.update(self._task, completed=run.step, loss=loss)

    def end(self, run: Run) -> None:
        self._progress.stop()


def _needs_validation(callback: Callback, run: Run) -> None:
    if run.validate is None:
        raise ValueError(
            f"{type(callback).__name__} needs validation data. Pass infer(..., validation=(inputs, targets))."
        )
