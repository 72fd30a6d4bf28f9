"""The record of a run: named columns of numbers against the step."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from posterity.errors import unknown

BLOCK = 256  # rows that wait as tensors before they are moved to the CPU together


class Trace:
    """What a run recorded: `trace["loss"]` (T,) or (T, M), at the steps `trace.steps("loss")`.

    Values wait on their device and are moved in blocks, so that recording does not stall a GPU. `seconds` is the wall
    time of the run, all its resumptions included.

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
        """Add one row at `step`."""
        for name, value in values.items():
            waiting = self._waiting.setdefault(name, [])
            waiting.append(value.detach() if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64))
            self._steps.setdefault(name, []).append(step)
            if len(waiting) >= BLOCK:
                self._move(name)

    def _move(self, name: str) -> None:
        waiting = self._waiting.get(name)
        if waiting:
            self._done.setdefault(name, []).append(torch.stack(waiting).to("cpu", torch.float64))
            waiting.clear()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the columns."""
        return tuple(self._steps)

    def __iter__(self) -> Iterator[str]:
        return iter(self._steps)

    def __contains__(self, name: object) -> bool:
        return name in self._steps

    def __getitem__(self, name: str) -> Tensor:
        """The column `name`, in float64 on the CPU."""
        if name not in self._steps:
            raise KeyError(unknown("trace column", name, self._steps))
        self._move(name)
        if len(self._done[name]) > 1:
            self._done[name] = [torch.cat(self._done[name])]
        return self._done[name][0]

    def recent(self, name: str, count: int) -> Tensor:
        """The last `count` values of the column `name` (or as many as there are), without moving the whole."""
        waiting = self._waiting.get(name, [])
        if len(waiting) >= min(count, len(self._steps[name])):
            return torch.stack(waiting[-count:])
        return self[name][-count:]

    def steps(self, name: str) -> Tensor:
        """The steps at which the column `name` was recorded, counted from 1."""
        self[name]
        return torch.tensor(self._steps[name])

    def tensors(self) -> dict[str, Tensor]:
        """All columns and their steps, for storing."""
        return {
            f"{kind}.{name}": self[name] if kind == "value" else self.steps(name)
            for name in self._steps
            for kind in ("value", "step")
        }

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> "Trace":
        """The trace that `tensors` stored."""
        trace = cls()
        for full in tensors:
            kind, _, name = full.partition(".")
            if kind == "value":
                trace._done[name] = [tensors[full]]
                trace._steps[name] = tensors[f"step.{name}"].tolist()
        return trace
