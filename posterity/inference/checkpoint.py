"""Runs that survive a kill: the whole state of a run in a folder, taken up again to the bit."""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from posterity.errors import BadFolder, positive
from posterity.inference.callbacks import Callback
from posterity.inference.run import Run
from posterity.inference.trace import Trace
from posterity.storage import Part, RunFolder, flatten, restore


@dataclass(frozen=True)
class Checkpoint:
    """Where and how often a run is stored: after `steps` steps, or when `seconds` have passed, whichever is set."""

    path: str | os.PathLike[str]
    seconds: float | None = 60.0
    steps: int | None = None

    def __post_init__(self) -> None:
        for name in ("seconds", "steps"):
            if getattr(self, name) is not None:
                positive(f"Checkpoint.{name}", getattr(self, name), "or None")


class Checkpointer:
    """Writes a run into its folder and takes it up again.

    Each commit adds the states kept since the last one as a part of their own, so that long chains are written once.
    `identity` is all that the numbers of the run depend on; a folder with another identity is refused.
    """

    def __init__(self, checkpoint: Checkpoint, identity: dict[str, Any], identity_tensors: dict[str, Tensor]) -> None:
        self.checkpoint = checkpoint
        self.folder = RunFolder(checkpoint.path)
        self._identity = Part(identity, identity_tensors)
        self._written = 0  # kept states already in the folder
        self._last_time, self._last_step = time.monotonic(), 0

    def resume(self, run: Run, callbacks: Sequence[Callback]) -> None:
        """Bring `run` and the callbacks to where the folder says, if it holds this run."""
        if not self.folder.exists() or "state" not in self.folder.parts():
            return
        self._same_run(self.folder.read("run"))
        part = self.folder.read("state")
        template = {"step": 0, "stopped": "", "state": run.state, "seconds": 0.0}
        for index, callback in enumerate(callbacks):
            template[f"callback.{index}"] = _callback_template(callback, run)
        stored = restore(part, template)
        run.step, run.stopped, run.state = stored["step"], stored["stopped"], stored["state"]
        run.trace = Trace.from_tensors(self.folder.read("trace").tensors)
        run.trace.seconds = stored["seconds"]
        for index, callback in enumerate(callbacks):
            callback.restore(stored[f"callback.{index}"])
        for name in sorted(name for name in self.folder.parts() if name.startswith("kept-")):
            shard = self.folder.read(name)
            count = int(shard.config["count"])  # type: ignore[arg-type]
            inner = Part({"state": shard.config["state"]}, shard.tensors)
            run.kept += restore(inner, [run.method.keep(run.state)] * count)
        self._written = len(run.kept)
        self._last_step = run.step

    def _same_run(self, stored: Part) -> None:
        for name, value in self._identity.config.items():
            if stored.config.get(name) != value:
                raise BadFolder(
                    f"{Path(self.checkpoint.path)} holds another run: its {name} differs. "
                    "Use another folder, or delete this one to begin anew."
                )
        for name, tensor in self._identity.tensors.items():
            other = stored.tensors.get(name)
            if other is None or other.shape != tensor.shape or not bool((other == tensor.cpu()).all()):
                raise BadFolder(
                    f"{Path(self.checkpoint.path)} holds another run: its {name} differs. "
                    "Use another folder, or delete this one to begin anew."
                )

    def after_step(self, run: Run, callbacks: Sequence[Callback]) -> None:
        """Store the run if it is time."""
        due_steps = self.checkpoint.steps is not None and run.step - self._last_step >= self.checkpoint.steps
        due_time = self.checkpoint.seconds is not None and time.monotonic() - self._last_time >= self.checkpoint.seconds
        if due_steps or due_time or run.step == run.steps or run.stopped:
            self.write(run, callbacks)

    def write(self, run: Run, callbacks: Sequence[Callback]) -> None:
        """Store the run now, in one atomic commit."""
        state = {"step": run.step, "stopped": run.stopped, "state": run.state, "seconds": run.trace.seconds}
        for index, callback in enumerate(callbacks):
            state[f"callback.{index}"] = callback.state()
        parts = {"run": self._identity, "state": flatten(state), "trace": Part({}, run.trace.tensors())}
        new = run.kept[self._written :]
        if new:
            shard = flatten(new)
            parts[f"kept-{self._written:09d}"] = Part({**shard.config, "count": len(new)}, shard.tensors)
        self.folder.commit(parts)
        self._written = len(run.kept)
        self._last_time, self._last_step = time.monotonic(), run.step


def _callback_template(callback: Callback, run: Run) -> Any:
    """The callback's own state as a template; a stored method state inside it looks like the run's."""
    template = callback.state()
    if isinstance(template, dict) and "best_state" in template:
        template = {**template, "best_state": [run.state]}
    return template
