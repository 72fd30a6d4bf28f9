"""The log density of a problem over all its data, as samplers walk on it."""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from posterity.inference.memory import activation_bytes, device_memory
from posterity.inference.method import Effort, Target
from posterity.model.batch import batch_tensors
from posterity.model.data import Batch, TensorData
from posterity.model.joint import Joint
from posterity.numerics.compiled import Compiled

logger = logging.getLogger("posterity")

BUDGET = 2**30  # bytes of activations at once on the CPU
_SHARE = 0.25  # of the memory of a GPU


Chunk: TypeAlias = tuple[Batch | None, float]  # rows, and their share of all


class _Fast(threading.local):
    effort: Effort = "none"


_FAST = _Fast()
_SHARED: dict[object, Compiled] = {}  # of functions that no density is part of
_KNOWN: "WeakKeyDictionary[Target, dict[int, Potential]]" = WeakKeyDictionary()  # by the number of chains


@contextmanager
def accelerated(effort: Effort) -> Iterator[None]:
    """Work handed to `Potential.run` inside `with` is recorded as CUDA graphs, or compiled as well."""
    before, _FAST.effort = _FAST.effort, effort
    try:
        yield
    finally:
        _FAST.effort = before


class Potential:
    """The log density (C,) and its gradient (C, P) at theta (C, P) over all rows of `batch`, exact.

    Networks run in evaluation mode. Rows go in chunks whose activations, for all chains, stay within `limit` bytes
    (None: 1 GiB on the CPU, a quarter of the memory of a GPU).

    >>> import torch, posterity as po
    >>> density = po.Density(lambda x: -0.5 * x.square().sum(), {"x": (2,)})
    >>> value, grad = Potential(density, None, chains=1)(torch.ones(1, 2))
    >>> value, grad
    (tensor([-1.]), tensor([[-1., -1.]]))
    """

    def __init__(self, joint: Target, batch: Batch | None, chains: int, limit: int | None = None) -> None:
        """Look how many rows fit at once."""
        self.chains = chains
        self._limit = limit
        self._joint = ref(joint)  # which goes when nobody else has it, and its potential with it
        self._compiled: dict[object, Compiled] = {}
        self.take(batch)

    def take(self, batch: Batch | None) -> None:
        """Go on with these rows in place of those before; what was compiled serves rows of the same shapes."""
        joint: Any = self._joint()
        self.batch = batch
        self._chunks = [(batch, 1.0)] if batch is None else _chunks(joint, batch, self.chains, self._limit)
        self._tensors: tuple[Tensor, ...] = () if batch is None else batch_tensors(batch)
        self._names = () if batch is None else (batch.per_member, *batch.tensors)  # what the tensors stand for

    def __call__(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Value and gradient."""
        value, grad = self._at(theta, *self._chunks[0])
        for chunk in self._chunks[1:]:
            more, slope = self._at(theta, *chunk)
            value, grad = value + more, grad.add_(slope)
        return value, grad

    def _at(self, theta: Tensor, rows: Any, share: float) -> tuple[Tensor, Tensor]:
        joint: Any = self._joint()
        value, grad, _ = joint.value_and_grad(theta, rows, train=False)
        return (value, grad) if share == 1.0 else (share * value, grad.mul_(share))

    @property
    def accelerated(self) -> bool:
        """Whether work is recorded or compiled now."""
        return _FAST.effort != "none"

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """`function(*arguments)`, compiled where that is wanted."""
        if not self.accelerated:
            return function(*arguments)
        own = any(argument is self for argument in arguments)
        table = self._compiled if own else _SHARED
        kind = (function, _FAST.effort, self._names if own else ())
        if kind not in table:
            work = partial(self._with_rows, function) if own else function
            table[kind] = Compiled(work, held=own, fused=_FAST.effort == "compiled")
        return table[kind](self._tensors, *arguments) if own else table[kind](*arguments)

    def doubt(self) -> None:
        """Look whether what was compiled is still what the problem says, at its next calls."""
        for compiled in self._compiled.values():
            compiled.doubt()

    def _with_rows(self, function: Callable[..., Any], tensors: tuple[Tensor, ...], *arguments: Any) -> Any:
        """The function's result where the rows are made of these tensors."""
        chunks, given = self._chunks, iter(tensors)
        first = chunks[0][0]
        if self.batch is None or first is None:
            return function(*arguments)
        try:
            self._chunks = _pieces(self.batch.map(lambda _: next(given)), first.size)
            return function(*arguments)
        finally:
            self._chunks = chunks


def budget(joint: Target) -> int:
    """Bytes that the activations of a gradient may take."""
    memory = device_memory(joint.device)
    return int(_SHARE * memory) if joint.device.type == "cuda" and memory else BUDGET


def potential(joint: Target, batch: Batch | None, chains: int) -> Potential:
    """The potential of the problem on these rows, made once."""
    table = _KNOWN.setdefault(joint, {})
    known = table.get(chains)
    if known is None:
        known = table[chains] = Potential(joint, batch, chains)
    elif known.batch is not batch:
        known.take(batch)
    return known


def doubt(joint: Target) -> None:
    """Look at the next calls whether what was compiled for the problem is still what it says.

    A density reads what it likes: variables of a notebook may have other values in the next run.
    """
    for known in _KNOWN.get(joint, {}).values():
        known.doubt()


def _chunks(joint: Joint, batch: Batch, chains: int, limit: int | None) -> list[Chunk]:
    """Pieces of the batch that fit, each with its share of the rows."""
    allowed = budget(joint) if limit is None else limit
    # The backward pass makes as much again; members of the joint are its chains.
    row = 2 * chains * activation_bytes(joint, TensorData(batch), 1) // (joint.num_members or 1)
    pieces = _pieces(batch, max(1, allowed // max(1, row)))
    if len(pieces) > 1:
        logger.info("a gradient over all %d rows is taken in %d pieces", batch.size, len(pieces))
    return pieces


def _pieces(batch: Batch, size: int) -> list[Chunk]:
    """The batch in pieces of so many rows, each with its share of them."""
    if size >= batch.size:
        return [(batch, 1.0)]
    axis = 1 if batch.per_member else 0
    pieces: list[Chunk] = []
    for low in range(0, batch.size, size):
        length = min(size, batch.size - low)
        pieces.append((batch.map(partial(torch.narrow, dim=axis, start=low, length=length)), length / batch.size))
    return pieces
