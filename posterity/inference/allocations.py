"""The memory of a gradient at any number of rows, from runs on two rows and on three, operation by operation."""

import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from posterity.model import Data, Joint, Problem
from posterity.model.data import NoData, OwnOrders
from posterity.model.stream import StreamData
from posterity.numerics.random import Key

FEW = 2, 3  # rows of the two runs


class _Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the bytes in memory after each operation inside `with`, of what was allocated there: `levels`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.levels: list[int] = []
        self._held = 0
        self._known: dict[int, torch.UntypedStorage | None] = {}  # by address of the storage; those from outside

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), options: Mapping[str, Any] | None = None
    ) -> Any:
        options = options or {}
        for leaf in tree_iter((arguments, options)):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                self._known.setdefault(storage._cdata, storage)  # held, so that its address is not used again
        result = function(*arguments, **options)
        for leaf in tree_iter(result):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in self._known:
                    self._known[storage._cdata] = None
                    self._held += storage.nbytes()
                    weakref.finalize(storage, self._freed, storage._cdata, storage.nbytes())
        self.levels.append(self._held)
        return result

    def _freed(self, address: int, size: int) -> None:
        self._held -= size
        del self._known[address]


def allocated(call: Callable[[int], object], rows: int) -> int:
    """Return the bytes that `call(rows)` allocates at its peak, from calls with two rows and with three.

    After each of its operations the bytes in memory are a straight line in the number of rows. What an operation
    allocates for itself is not seen.

    >>> allocated(lambda rows: torch.zeros(rows, 10) + 1.0, 100)
    8000
    """
    runs = []
    for few in FEW:
        with _Allocations() as run:
            call(few)
        runs.append(run.levels)
    two, three = runs if len(runs[0]) == len(runs[1]) else ([max(levels)] for levels in runs)
    return max((max(0, low + (rows - FEW[0]) * (high - low)) for low, high in zip(two, three, strict=True)), default=0)


def batch_bytes(data: Data, rows: int | None) -> int:
    """Return the bytes of a batch of this many rows (None: all, where they lie), and of the order of all rows."""
    if isinstance(data, (NoData, StreamData)) or rows is None or rows >= data.num_data:
        return 0
    first = data.first()
    members = len(data.keys(Key(0))) if isinstance(data, OwnOrders) and not first.per_member else 1
    each = sum(tensor.numel() * tensor.itemsize for tensor in first.tensors.values()) // max(1, first.size)
    return members * (rows * each + 8 * data.num_data)


def gradient_bytes(joint: Problem, data: Data, rows: int | None, members: int | None = None) -> int:
    """Return the bytes of a gradient at a batch of rows (None: all), beside theta and the gradient: the activations.

    `members` (None: those of the joint, or a single theta) run at once, or in turn, as the network runs them.
    """
    if not isinstance(joint, Joint) or isinstance(data, NoData):
        return 0
    members = joint.num_members if members is None else members
    joint = replace(joint.member(0).alone)  # another object, whose caches hold nothing for the run
    network, first = joint.network, data.first().member(0)
    count = min(data.num_data, data.num_data if rows is None else rows, network.passes.micro_batch or data.num_data)
    batch = joint.check(first.map(lambda t: t[torch.arange(max(FEW), device=t.device) % first.size].to(joint.device)))
    together = None if members is None or network.one_by_one else 2
    start = joint.initial()
    theta = start if together is None else start.expand(together, -1)
    grad = torch.zeros_like(theta, memory_format=torch.contiguous_format)
    buffers = joint.starting_buffers(theta)

    def call(few: int) -> object:
        return joint.data_value_and_grad(theta, batch.rows(0, few), buffers, out=grad)

    with network.without_dropout(batch.inputs):
        call(2)  # the first call is not like the others
        found = allocated(call, count)
    return found if together is None or members is None else members * found // together
