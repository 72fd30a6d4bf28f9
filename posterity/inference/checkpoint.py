"""Checkpoints: the state of a run in a folder, from which an interrupted run resumes bit for bit."""

import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

from torch import Tensor

from posterity.errors import Diverged, positive, positive_whole, shown
from posterity.inference.callbacks import Callback
from posterity.inference.identity import refuse_other
from posterity.inference.run import Run, Trace, check_kept, check_loss
from posterity.likelihoods import Likelihood
from posterity.priors import Prior
from posterity.storage import Part, RunFolder, decode, flatten, mapped, restore


@dataclass(frozen=True)
class Checkpoint:
    """The folder of a run, and how often it is stored: every `steps` steps, every `seconds` seconds, or both.

    The run is also stored at its end and, after the current step, on Ctrl-C. A state that is not finite (for an
    ensemble: finite in no member) is never stored: a run that diverges leaves its last good state.
    """

    path: str | os.PathLike[str]
    seconds: float | None = 60.0
    steps: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.path, (str, os.PathLike)):
            raise TypeError(f"Checkpoint.path must be a folder's path. Got {shown(self.path)}.")
        if self.seconds is not None:
            positive("Checkpoint.seconds", self.seconds, "or None")
        if self.steps is not None:
            positive_whole("Checkpoint.steps", self.steps, "or None")


def stored_problem(checkpoint: Checkpoint) -> tuple[Prior, Likelihood] | None:
    """The prior and likelihood of the run in a folder, whose scales it may have chosen; None where there is none."""
    folder = RunFolder(checkpoint.path)
    if not folder.exists() or "run" not in folder.parts():
        return None
    stored = folder.read("run")
    model, tensors = stored.config.get("model"), stored.tensors
    if not isinstance(model, dict) or "prior" not in model or "likelihood" not in model:
        return None
    return cast(Prior, decode(model["prior"], tensors)), cast(Likelihood, decode(model["likelihood"], tensors))


class Checkpointer:
    """Writes a run and its callbacks into their folder, and resumes them.

    Each commit adds the states kept since the last one as a new part, so long chains are written once. `identity` is
    everything that the numbers of the run depend on; a folder with another identity is refused.
    """

    def __init__(self, checkpoint: Checkpoint, callbacks: Sequence[Callback], identity: Part) -> None:
        self.checkpoint = checkpoint
        self.folder = RunFolder(checkpoint.path)
        self._callbacks: dict[str, Callback] = {}  # by names that do not depend on callbacks without a state
        count: Counter[str] = Counter()
        for callback in callbacks:
            if callback.state() is not None:
                kind = type(callback).__name__
                self._callbacks[f"{kind}-{count[kind]}"] = callback
                count[kind] += 1
        self._identity = Part({**identity.config, "callbacks": list(self._callbacks)}, identity.tensors)
        self._written = 0  # number of kept states in the folder
        self._last_time, self._last_step = time.monotonic(), 0

    @property
    def stored(self) -> int | None:
        """The step of the stored state, None if there is none yet."""
        return self._last_step or None

    def resume(self, run: Run) -> None:
        """Restore `run` and the callbacks from the folder, if it holds this run."""
        if not self.folder.exists() or "state" not in self.folder.parts():
            # A folder that cannot be written is refused before the first step.
            self.folder.commit({"run": self._identity})
            return
        refuse_other(self.checkpoint.path, self._identity, self.folder.read("run"))
        template = {
            "step": 0,
            "stopped": "",
            "seconds": 0.0,
            "state": run.state,
            "callbacks": {name: callback.template(run) for name, callback in self._callbacks.items()},
        }
        stored = restore(self.folder.read("state"), template, run.joint.device)
        run.step, run.stopped, run.state = stored["step"], stored["stopped"], stored["state"]
        run.trace = Trace.from_tensors(self.folder.read("trace").tensors)
        run.trace.seconds = stored["seconds"]
        for name, callback in self._callbacks.items():
            callback.restore(stored["callbacks"][name])
        kept = mapped(lambda leaf: leaf.cpu() if isinstance(leaf, Tensor) else leaf, run.method.keep(run.state))
        for name in self.folder.parts():  # sorted, so in the order in which they were kept
            if name.startswith("kept-"):
                shard = self.folder.read(name)
                for state in restore(shard, [kept] * len(shard.config["state"])):  # type: ignore[arg-type]
                    run.kept.append(state)
        self._written = len(run.kept)
        self._last_step = run.step

    def after_step(self, run: Run, now: bool) -> None:
        """Store the run if it is due, or `now`."""
        due_steps = self.checkpoint.steps is not None and run.step - self._last_step >= self.checkpoint.steps
        due_time = self.checkpoint.seconds is not None and time.monotonic() - self._last_time >= self.checkpoint.seconds
        if now or due_steps or due_time or run.step == run.steps or run.stopped:
            # On a GPU the loss is checked only now and then, and no loss covers the last update.
            traits = run.method.traits
            check_loss(run.joint, run.trace, run.state, run.step - self._last_step, traits.row)
            part = run.state if traits.accountable is None else traits.accountable(run.state)
            check_kept(run.joint, [part], run.step, traits.row)
            self.write(run)

    def write(self, run: Run) -> None:
        """Store the run in one atomic commit."""
        state = {
            "step": run.step,
            "stopped": run.stopped,
            "seconds": run.trace.seconds,
            "state": run.state,
            "callbacks": {name: callback.state() for name, callback in self._callbacks.items()},
        }
        parts = {"run": self._identity, "state": flatten(state), "trace": Part({}, run.trace.tensors())}
        if len(run.kept) > self._written:
            parts[f"kept-{self._written:09d}"] = flatten(run.kept[self._written :])
        self.folder.commit(parts)
        self._written = len(run.kept)
        self._last_time, self._last_step = time.monotonic(), run.step


@contextmanager
def last_good(keeper: Checkpointer | None, run: Run) -> Iterator[None]:
    """Add to the error of a run that diverges where its last good state is, and the posterior of its kept states."""
    try:
        yield
    except Diverged as error:
        error.stored = None if keeper is None else keeper.stored
        where = "" if keeper is None else repr(os.fspath(keeper.checkpoint.path))
        if error.stored is not None:
            note = f"The last good state, after step {error.stored}, is in {where}."
        elif keeper is not None:
            note = f"No state is in {where} yet: it broke before the first was due."
        else:
            note = "No state was stored: with checkpoint= the last good one would be."
        # On a GPU the loss is not checked after every step, so the run may be past the error.
        error.posterior = run.so_far(error.step if error.step < run.step else run.step + 1)
        if error.posterior is not None:
            note += " The posterior of what it had kept is in the error (error.posterior)."
        error.args = (f"{error} {note}",)
        raise
