"""Checkpoints: the state of a run in a folder, from which an interrupted run resumes bit for bit."""

import logging
import os
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from posterity.errors import BadFolder, Diverged, positive, positive_whole, shown
from posterity.inference.callbacks import Callback
from posterity.inference.identity import refuse_other
from posterity.inference.method import Method
from posterity.inference.run import Run, Trace, check_kept, check_loss
from posterity.model.joint import Joint
from posterity.processes import active, done_by_first
from posterity.storage import Part, RunFolder, decode, flatten, forms, is_described, mapped, references, restore
from posterity.storage.schema import AGAIN, check_fields, check_names, check_tensor, reading

logger = logging.getLogger("posterity")


@dataclass(frozen=True)
class Checkpoint:
    """The folder of a run, and how often it is stored: every `steps` steps, every `seconds` seconds, or both.

    The same call resumes the run. A call with more steps (or draws of SGLD and SGHMC) goes on after the last one, bit
    for bit as a run of that length, where no schedule depends on the length; scales that were left out stay as chosen.
    The run is also stored at its end, if it took `least` seconds, and on Ctrl-C, after the current step. A state that
    is not finite (for an ensemble: finite in no member) is never stored: a run that diverges leaves its last good
    state.
    """

    path: str | os.PathLike[str]
    seconds: float | None = 60.0
    steps: int | None = None
    least: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.path, (str, os.PathLike)):
            raise TypeError(f"Checkpoint.path must be a folder's path. Got {shown(self.path)}.")
        if self.seconds is not None:
            positive("Checkpoint.seconds", self.seconds, "or None")
        if self.steps is not None:
            positive_whole("Checkpoint.steps", self.steps, "or None")
        if self.least is not None:
            positive("Checkpoint.least", self.least, "or None")


def stored_problem(checkpoint: Checkpoint, joint: Joint) -> Joint | None:
    """The joint with prior and likelihood of the run in a folder, whose scales it may have chosen; None without one."""
    folder = RunFolder(checkpoint.path, active())
    if not folder.exists() or "run" not in folder.parts():
        return None
    stored = folder.read("run")
    model, tensors = stored.config.get("model"), stored.tensors
    if not isinstance(model, dict) or "prior" not in model or "likelihood" not in model:
        return None
    parts = {name: model[name] for name in ("prior", "likelihood") if not is_described(model[name])}
    changes: dict[str, Any] = {name: decode(part, tensors) for name, part in parts.items()}  # others are the user's
    return replace(joint, **changes)


_LENGTH = re.compile(r"\b(steps|draws)=(\d+)")


class Checkpointer:
    """Writes a run and its callbacks into their folder, and resumes them.

    Each commit adds the states kept since the last one as a new part, so long chains are written once. `identity` is
    everything that the numbers of the run depend on; a folder with another identity is refused.
    """

    def __init__(self, checkpoint: Checkpoint, callbacks: Sequence[Callback], identity: Part) -> None:
        self.checkpoint = checkpoint
        self.folder = RunFolder(checkpoint.path, active())
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
            if self.checkpoint.least is None:  # a folder that cannot be written is refused before the first step
                done_by_first(lambda: self.folder.commit({"run": self._identity}))
            return
        stored = self.folder.read("run")
        begun = self._shorter(run.method, stored.config.get("method"))
        method = {} if begun is None else {"method": stored.config["method"]}
        refuse_other(self.checkpoint.path, Part({**self._identity.config, **method}, self._identity.tensors), stored)
        with reading(f"Run folder {os.fspath(self.checkpoint.path)!r}: its checkpoint"):
            self._restore(run)
        if begun is not None:
            logger.info("The run in %r goes on after step %d.", os.fspath(self.checkpoint.path), run.step)
            if run.step == begun:
                run.trace.reopen(run.step)

    def _shorter(self, method: Method, stored: object) -> int | None:
        """Return the steps or draws of the stored method where it is this one with fewer of them; None else.

        Raises BadFolder where its run is not the beginning of a run of this method.
        """
        now = repr(method)
        for setting, number in _LENGTH.findall(stored) if isinstance(stored, str) and stored != now else ():
            longer = any(kind == setting and int(own) > int(number) for kind, own in _LENGTH.findall(now))
            shorter = method.shortened(int(number)) if longer else None
            if shorter is None or repr(shorter[0]) != stored:
                continue
            reason = (
                shorter[1]
                or (self._callbacks and f"{next(iter(self._callbacks))} looks at other steps of a longer run")
                or ""
            )
            if reason:
                raise BadFolder(
                    f"{os.fspath(self.checkpoint.path)!r} holds a run of {setting}={number}, which is not the "
                    f"beginning of this one: {reason}. Start another run from its posterior, infer(..., start=q), in "
                    "another folder, or delete this one to begin anew."
                )
            return int(number)
        return None

    def _restore(self, run: Run) -> None:
        template = {
            "step": 0,
            "stopped": "",
            "seconds": 0.0,
            "state": run.state,
            "callbacks": {name: callback.template(run) for name, callback in self._callbacks.items()},
        }
        part = self.folder.read("state")
        check_names("The tensor file", sorted(part.tensors), sorted(references(dict(part.config))))
        stored = restore(part, template, run.joint.device)
        check_fields("The state", stored, {"step": int, "stopped": str, "seconds": float})
        if not 0 < stored["step"] <= run.steps:
            raise BadFolder(f"The step must be from 1 to {run.steps}. Got {stored['step']}. {AGAIN}")
        traits = run.method.traits
        run.step, run.stopped, run.state = stored["step"], stored["stopped"], stored["state"]
        accountable = run.state if traits.accountable is None else traits.accountable(run.state)
        check_kept(run.joint, [accountable], run.step, traits.row)  # nothing else is ever stored
        trace = self.folder.read("trace")
        _check_trace(trace, run.step)
        run.trace = Trace.from_tensors(trace.tensors)
        run.trace.seconds = float(stored["seconds"])
        for name, callback in self._callbacks.items():
            callback.restore(stored["callbacks"][name])
        kept = mapped(lambda leaf: leaf.cpu() if isinstance(leaf, Tensor) else leaf, run.method.keep(run.state))
        for name in self.folder.parts():  # sorted, so in the order in which they were kept
            if name.startswith("kept-"):
                shard = self.folder.read(name)
                for state in restore(shard, [kept] * len(shard.config["state"])):  # type: ignore[arg-type]
                    run.kept.append(state)
        due = sum(step <= run.step for step in traits.kept_steps)
        if len(run.kept) != due or run.kept.num_finite() != due:
            raise BadFolder(
                f"After step {run.step} it must have kept {due} finite states. Got {run.kept.num_finite()} of "
                f"{len(run.kept)}. {AGAIN}"
            )
        self._written = len(run.kept)
        self._last_step = run.step

    def due(self, run: Run) -> bool:
        """Return whether the time or the steps between two stored states have passed."""
        due_steps = self.checkpoint.steps is not None and run.step - self._last_step >= self.checkpoint.steps
        due_time = self.checkpoint.seconds is not None and time.monotonic() - self._last_time >= self.checkpoint.seconds
        return due_steps or due_time

    def after_step(self, run: Run, due: bool) -> None:
        """Store the run if it is `due`, or at its end."""
        ends = run.step == run.steps or bool(run.stopped)
        if due or ends:
            # On a GPU the loss is checked only now and then, and no loss covers the last update.
            traits = run.method.traits
            check_loss(run.joint, run.trace, run.state, run.step - self._last_step, traits.row)
            part = run.state if traits.accountable is None else traits.accountable(run.state)
            check_kept(run.joint, [part], run.step, traits.row)
            if due or run.trace.seconds >= (self.checkpoint.least or 0.0):
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
        trace = run.trace.tensors()
        parts = {"run": self._identity, "state": flatten(state), "trace": Part({"tensors": forms(trace)}, trace)}
        if len(run.kept) > self._written:
            parts[f"kept-{self._written:09d}"] = flatten(run.kept[self._written :])
        done_by_first(lambda: self.folder.commit(parts))
        self._written = len(run.kept)
        self._last_time, self._last_step = time.monotonic(), run.step


def _check_trace(part: Part, step: int) -> None:
    """Check that each column of a stored trace has its steps, which rise up to the step of the state."""
    tensors = part.tensors
    if not part.older and part.config["tensors"] != forms(tensors):
        raise BadFolder(f"The trace does not have the shapes and dtypes that are stored with it. {AGAIN}")
    names = {name.partition(".")[2] for name in tensors}
    check_names(
        "The trace", sorted(tensors), [f"{kind}.{name}" for kind in ("step", "value") for name in sorted(names)]
    )
    for name in names:
        values, steps = tensors[f"value.{name}"], tensors[f"step.{name}"]
        check_tensor(f"The steps of {name!r} in the trace", steps, values.shape[:1], torch.int64)
        rises = bool((steps.diff() > 0).all()) and (not len(steps) or 0 <= int(steps[0]) <= int(steps[-1]) <= step)
        if not rises or values.dtype != torch.float64:
            raise BadFolder(f"The trace must have float64 values of {name!r} at steps that rise to {step}. {AGAIN}")


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
        error.posterior = run.so_far(error.step)
        if error.posterior is not None:
            note += " The posterior of what it had kept is in the error (error.posterior)."
        error.args = (f"{error} {note}",)
        raise
