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
        """No columns yet."""
        self.seconds = 0.0
        self._done: dict[str, list[Tensor]] = {}
        self._steps: dict[str, list[int]] = {}
        self._waiting: dict[str, list[Tensor]] = {}

    def record(self, step: int, values: Mapping[str, Tensor | float]) -> None:
        """Add one row at `step`. Tensors are read later: nobody may overwrite them."""
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
        """Names of the columns, sorted."""
        return tuple(sorted(self._steps))

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __contains__(self, name: object) -> bool:
        return name in self._steps

    def __getitem__(self, name: str) -> Tensor:
        """The column `name`, in float64 on the CPU."""
        self._known(name)
        self._move(name)
        if len(self._done[name]) > 1:
            self._done[name] = [torch.cat(self._done[name])]
        return self._done[name][0]

    def recent(self, name: str, count: int) -> Tensor:
        """The last `count` values of the column `name` (or as many as there are), without gathering the whole."""
        self._known(name)
        waiting = self._waiting.get(name, [])
        if len(waiting) >= count:
            return torch.stack(waiting[-count:])
        self._move(name)
        blocks: list[Tensor] = []
        for block in reversed(self._done[name]):
            blocks.insert(0, block)
            if sum(map(len, blocks)) >= count:
                break
        return torch.cat(blocks)[-count:]

    def steps(self, name: str) -> Tensor:
        """The steps at which the column `name` was recorded, counted from 1."""
        self._known(name)
        return torch.tensor(self._steps[name])

    def last_step(self, name: str) -> int:
        """The last step at which the column `name` was recorded, 0 if never."""
        return self._steps[name][-1] if name in self._steps else 0

    def _known(self, name: str) -> None:
        if name not in self._steps:
            raise KeyError(unknown("trace column", name, self._steps))

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
