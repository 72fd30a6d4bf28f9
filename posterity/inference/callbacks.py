"""What can be done after every step of a run."""

import math
import sys
import time
from abc import ABC
from typing import Any

from posterity.errors import positive
from posterity.inference.run import Run
from posterity.storage import clone


class Callback(ABC):  # noqa: B024  every hook is optional
    """Called by `infer`; what `state` returns is stored in checkpoints and handed to `restore` on resume."""

    def start(self, run: Run) -> None:
        """Before the first step of this session, after a resume."""

    def after_step(self, run: Run) -> None:
        """After every step."""

    def end(self, run: Run) -> None:
        """After the last step, before the posterior is made."""

    def state(self) -> Any:
        """What a resumed run needs to go on exactly (a nest of tensors and numbers)."""
        return None

    def restore(self, state: Any) -> None:
        """Take up a stored `state`."""


class Validation(Callback):
    """Records "validation_nll", the mean negative log-likelihood of the validation rows, `every` so many steps."""

    def __init__(self, every: int) -> None:
        positive("Validation.every", every)
        self.every = every

    def after_step(self, run: Run) -> None:
        """Predict at the validation rows."""
        if run.validate is not None and (run.step % self.every == 0 or run.step == run.steps):
            run.trace.record(run.step, {"validation_nll": run.validate(run.latest())})


class EarlyStopping(Callback):
    """Stops when "validation_nll" has not improved for `patience` looks, and goes back to the best state.

    Takes the number of looks to wait and the least improvement, in nats per row, that counts.
    """

    def __init__(self, patience: int = 10, least: float = 0.0) -> None:
        positive("EarlyStopping.patience", patience)
        self.patience = patience
        self.least = least
        self._best, self._best_step, self._best_state, self._looks = math.inf, 0, None, 0

    def start(self, run: Run) -> None:
        """There must be validation data to look at."""
        if run.validate is None:
            raise ValueError("EarlyStopping needs validation data. Pass infer(..., validation=(inputs, targets)).")

    def after_step(self, run: Run) -> None:
        """Look once for each new value."""
        if "validation_nll" not in run.trace or int(run.trace.steps("validation_nll")[-1]) != run.step:
            return
        value = float(run.trace["validation_nll"][-1])
        if value < self._best - self.least:
            self._best, self._best_step, self._looks = value, run.step, 0
            self._best_state = clone(run.state)
        else:
            self._looks += 1
            if self._looks >= self.patience:
                run.stopped = f"validation did not improve after step {self._best_step}"

    def end(self, run: Run) -> None:
        """Back to the best state."""
        if self._best_state is not None:
            run.state = self._best_state

    def state(self) -> Any:
        """The best value so far, where, and its state."""
        return {
            "best": self._best,
            "best_step": self._best_step,
            "looks": self._looks,
            "best_state": [] if self._best_state is None else [self._best_state],
        }

    def restore(self, state: Any) -> None:
        """Take them up again."""
        self._best, self._best_step, self._looks = state["best"], state["best_step"], state["looks"]
        self._best_state = state["best_state"][0] if state["best_state"] else None


class ProgressBar(Callback):
    """A bar on standard error with the loss and the time left. Needs `rich`; refreshes ten times a second."""

    def __init__(self) -> None:
        self._progress: Any = None
        self._shown = 0.0

    def start(self, run: Run) -> None:
        """Draw the bar."""
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
        loss = f"loss {float(run.trace['loss'][-1].mean()):.4f}" if "loss" in run.trace else ""
        self._progress.update(self._task, completed=run.step, loss=loss)

    def end(self, run: Run) -> None:
        """Take the bar away."""
        self._progress.stop()
