"""The state of a run, its trace, and checks that both are finite."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from posterity.errors import Diverged, PosterityError, unknown
from posterity.inference.kept import Kept
from posterity.inference.method import Method
from posterity.model.problem import Problem
from posterity.numerics.finite import all_finite
from posterity.posteriors.posterior import Posterior
from posterity.storage import clone, flatten

BLOCK = 256  # rows that stay on their device before they are moved to the CPU together


class Trace:
    """The record of a run: `trace["loss"]` (T,) or (T, M), at the steps `trace.steps("loss")`.

    Values stay on their device and are moved in blocks, so that recording does not stall a GPU. `seconds` is the wall
    time of the run, including all resumptions.

    >>> trace = Trace()
    >>> trace.record(1, {"loss": 2.0})
    >>> trace.record(2, {"loss": 1.5})
    >>> trace["loss"], trace.steps("loss")
    (tensor([2.0000, 1.5000], dtype=torch.float64), tensor([1, 2]))
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._done: dict[str, list[Tensor]] = {}
        self._steps: dict[str, list[int]] = {}
        self._waiting: dict[str, list[Tensor]] = {}

    def record(self, step: int, values: Mapping[str, Tensor | float]) -> None:
        """Add one row at `step`. Tensors are read later, so they must not be overwritten."""
        for name, value in values.items():
            if not isinstance(value, Tensor):
                value = torch.tensor(value, dtype=torch.float64)
            elif value.requires_grad:
                value = value.detach()
            waiting = self._waiting.get(name)
            if waiting is None:
                waiting = self._waiting[name] = []
                self._steps.setdefault(name, [])
            waiting.append(value)
            self._steps[name].append(step)
            if len(waiting) >= BLOCK:
                self._move(name)

    def _move(self, name: str) -> None:
        waiting = self._waiting.get(name)
        if waiting:
            self._done.setdefault(name, []).append(torch.stack(waiting).to("cpu", torch.float64))
            waiting.clear()

    @property
    def names(self) -> tuple[str, ...]:
        """Sorted names of the columns."""
        return tuple(sorted(self._steps))

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __contains__(self, name: object) -> bool:
        return name in self._steps

    def __getitem__(self, name: str) -> Tensor:
        """Return the column `name`, in float64 on the CPU."""
        self._known(name)
        self._move(name)
        if len(self._done[name]) > 1:
            self._done[name] = [torch.cat(self._done[name])]
        return self._done[name][0]

    def recent(self, name: str, count: int) -> Tensor:
        """Return the last `count` values of the column `name` (or all), without gathering the whole column."""
        self._known(name)
        waiting = self._waiting.get(name, [])
        if len(waiting) >= count:
            return waiting[-1].unsqueeze(0) if count == 1 else torch.stack(waiting[-count:])
        self._move(name)
        blocks: list[Tensor] = []
        for block in reversed(self._done[name]):
            blocks.insert(0, block)
            if sum(map(len, blocks)) >= count:
                break
        return torch.cat(blocks)[-count:]

    def steps(self, name: str) -> Tensor:
        """Return the steps at which the column `name` was recorded, counted from 1."""
        self._known(name)
        return torch.tensor(self._steps[name])

    def last_step(self, name: str) -> int:
        """Return the last step at which the column `name` was recorded, 0 if never."""
        return self._steps[name][-1] if name in self._steps else 0

    def _known(self, name: str) -> None:
        if name not in self._steps:
            raise KeyError(unknown("trace column", name, self._steps))

    def reopen(self, last: int) -> None:
        """Drop the columns that only the last step of a finished run has, which its end recorded."""
        for name in [name for name, steps in self._steps.items() if steps == [last] and last > 1]:
            del self._steps[name], self._done[name]
            self._waiting.pop(name, None)

    def tensors(self) -> dict[str, Tensor]:
        """Return all columns and their steps, for storage."""
        tensors: dict[str, Tensor] = {}
        for name in self._steps:
            tensors |= {f"value.{name}": self[name], f"step.{name}": self.steps(name)}
        return tensors

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> "Trace":
        """Return the trace that `tensors` stored."""
        trace = cls()
        for full in tensors:
            kind, _, name = full.partition(".")
            if kind == "value":
                trace._done[name] = [tensors[full]]
                trace._steps[name] = tensors[f"step.{name}"].tolist()
        return trace


_REMEDY = "Use a smaller step size, standardise the inputs and targets, or look for extreme rows."
_RAN_OFF = "The density may be improper, or the step size too large: look for a prior that is missing."
_NO_DENSITY = "Mend the density there, or use a smaller step size."
FAR = 1e15  # a chain with a position beyond this is diverging
_ELSEWHERE = "Begin at other weights (start=), or take a prior that allows these."


def check_loss(joint: Problem, trace: Trace, state: Any, count: int, row: str = "member") -> None:
    """Raise `Diverged` if any of the last `count` values of the trace's "loss" is not finite.

    `row` is the meaning of a row of theta (M, P).
    """
    if "loss" not in trace:
        return
    recent = trace.recent("loss", count)
    # Reads one number; the sum may overflow where no loss does.
    if math.isfinite(float(recent if recent.numel() == 1 else recent.sum())):
        return
    bad = ~torch.isfinite(recent).reshape(len(recent), -1).all(1)
    if not bool(bad.any()):
        return
    step = int(trace.steps("loss")[-len(recent) :][bad.to("cpu")][0])
    first = recent[bad][0]  # () or (M,)
    index = int((~torch.isfinite(first)).nonzero()[0, 0]) if first.dim() == 1 else None
    if row == "chain" and index is not None:
        _refuse_chain(joint, state, step, index, float(first[index]))
    tensor, cause, remedy = _first_bad(joint, state, index)[0], "", _REMEDY
    if "kl" in trace and not bool(torch.isfinite(trace.recent("kl", count)[bad]).all()):
        tensor = tensor or "the KL to the prior"
        cause = " The KL to the prior is not finite: the prior has no density at such weights, or they are too large."
        remedy = _ELSEWHERE if step == 1 else _REMEDY
    tensor = tensor or "the log-likelihood of the batch"
    message = f"The loss is not finite at step {step} (first seen in {_where(tensor, index, row)}).{cause} {remedy}"
    raise Diverged(message, step=step, tensor=tensor)


def _refuse_chain(joint: Problem, state: Any, step: int, chain: int, loss: float) -> None:
    """Raise `Diverged` for a chain that ran off to infinity, or whose log density is not a number."""
    tables = {path.rpartition(".")[2]: tensor for path, tensor in _floating(state).items()}
    theta, density = tables.get("theta"), tables.get("log_density")
    if theta is None or density is None:  # chains on mini-batches record no density
        return
    size = theta[chain].abs().nan_to_num(torch.inf, torch.inf)
    index = int(size.argmax())
    if float(size[index]) >= FAR:
        tensor = joint.layout.name_at(index)
        message = f"Chain {chain} ran off at step {step}: '{tensor}' is {float(theta[chain, index]):.3g}. {_RAN_OFF}"
        raise Diverged(message, step=step, tensor=tensor)
    message = f"Chain {chain} came to a log density of {-loss} at step {step}. {_NO_DENSITY}"
    raise Diverged(message, step=step, tensor="the log density")


def check_kept(joint: Problem, kept: Sequence[Any], step: int, row: str = "member") -> None:
    """Raise `Diverged` if kept states are not finite; see `check_loss`."""
    if isinstance(kept, Kept):  # many small states are checked together
        kept = kept[kept.num_finite() :][:1]
    # A state on a GPU may have some numbers on the CPU.
    good = [all_finite(tensor).cpu() for state in kept for tensor in _floating(state).values()]
    if not good or bool(torch.stack(good).all()):
        return
    tensor, index = next(bad for state in kept if (bad := _first_bad(joint, state))[0])
    message = f"The run is not finite after step {step} (first seen in {_where(tensor, index, row)}). {_REMEDY}"
    raise Diverged(message, step=step, tensor=tensor)


def _where(tensor: str, index: int | None, row: str) -> str:
    return tensor if index is None else f"{tensor} of {row} {index}"


def _floating(state: Any) -> dict[str, Tensor]:
    return {path: tensor for path, tensor in flatten(state).tensors.items() if tensor.is_floating_point()}


def _first_bad(joint: Problem, state: Any, row: int | None = None) -> tuple[str, int | None]:
    """Return the first tensor with an entry that is not finite, "" if there is none, and its row where theta has rows.

    Entries of flat vectors are named by their weights. With `row`, only that row of theta is checked.
    """
    for path, tensor in _floating(state).items():
        bad, itself = ~torch.isfinite(tensor), path in ("theta", "parameters")
        if itself and bad.dim() == 2 and bool(bad.any()):
            row = int(bad.nonzero()[0, 0]) if row is None else row
            bad = bad[row]
        if bool(bad.any()):
            random = joint.random_indices
            scaled = joint.size + (joint.num_weights if random is None else random.numel())  # means, then scales
            length = tensor.shape[-1] if tensor.dim() else 0
            more = path == "parameters" and length > scaled  # other parameters of a covariance follow these
            if not more and length not in (joint.size, joint.num_weights, scaled):
                return path, row
            index = int(bad.nonzero()[0, -1])
            if index >= scaled:
                return "the covariance", row
            if index >= joint.size:
                index -= joint.size
                return f"the scale of {joint.layout.name_at(index if random is None else int(random[index]))}", row
            name = joint.layout.name_at(index)
            return name if itself else f"{path} of {name}", row
    return "", row


@dataclass
class Run:
    """A run after `step` of `steps` steps. Callbacks may replace `state` and set `stopped` to the reason to stop."""

    method: Method
    joint: Problem
    steps: int
    step: int
    state: Any
    trace: Trace = field(default_factory=Trace)
    kept: Kept = field(default_factory=Kept)
    stopped: str = ""
    validate: Callable[[Posterior], float | Tensor] | None = None

    def posterior(self) -> Posterior:
        """Return the posterior as if the run ended here."""
        return self._made(self.kept or [clone(self.method.keep(self.state))])

    def latest(self) -> Posterior:
        """Return the posterior of the current state alone."""
        return self._made([clone(self.method.keep(self.state))])  # the next step overwrites the state

    def so_far(self, before: int) -> Posterior | None:
        """Return the posterior of the finite states kept before step `before`; None if there are none."""
        kept = sum(step < before for step in self.method.traits.kept_steps)
        good = self.kept.first(min(self.kept.num_finite(), kept))
        try:
            return self.method.posterior(self.joint, good) if good else None
        except (PosterityError, ArithmeticError, ValueError):  # the error of the run itself is raised instead
            return None

    def _made(self, kept: Sequence[Any]) -> Posterior:
        # No loss covers the last update, which may have diverged.
        check_kept(self.joint, kept, self.step, self.method.traits.row)
        return self.method.posterior(self.joint, kept)
