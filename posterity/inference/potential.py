"""The log density of a problem over all its data, as samplers walk on it."""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary, ref

from torch import Tensor

from posterity.inference.memory import activation_bytes, device_memory
from posterity.inference.method import Target
from posterity.model.data import Batch, TensorData
from posterity.model.joint import Joint
from posterity.numerics.compiled import Compiled

logger = logging.getLogger("posterity")

BUDGET = 2**30  # bytes of activations at once on the CPU
_SHARE = 0.25  # of the memory of a GPU


class _Fast(threading.local):
    wanted: bool = False


_FAST = _Fast()
_SHARED: dict[Callable[..., Any], Compiled] = {}  # of functions that no density is part of
_KNOWN: "WeakKeyDictionary[Target, Potential]" = WeakKeyDictionary()


@contextmanager
def accelerated(wanted: bool) -> Iterator[None]:
    """Work handed to `Potential.run` inside `with` is compiled, if wanted."""
    before, _FAST.wanted = _FAST.wanted, wanted
    try:
        yield
    finally:
        _FAST.wanted = before


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
        self.batch, self.chains = batch, chains
        self._joint = ref(joint)  # which goes when nobody else has it, and its potential with it
        self._chunks = [(batch, 1.0)] if not isinstance(joint, Joint) else _chunks(joint, batch, chains, limit)
        self._compiled: dict[Callable[..., Any], Compiled] = {}

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

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """`function(*arguments)`, compiled where that is wanted."""
        if not _FAST.wanted:
            return function(*arguments)
        table = self._compiled if any(argument is self for argument in arguments) else _SHARED
        compiled = table.get(function)
        if compiled is None:
            compiled = table[function] = Compiled(function)
        return compiled(*arguments)


def budget(joint: Target) -> int:
    """Bytes that the activations of a gradient may take."""
    memory = device_memory(joint.device)
    return int(_SHARE * memory) if joint.device.type == "cuda" and memory else BUDGET


def potential(joint: Target, batch: Batch | None, chains: int) -> Potential:
    """The potential of the problem on these rows, made once."""
    known = _KNOWN.get(joint)
    if known is None or known.batch is not batch or known.chains != chains:
        known = _KNOWN[joint] = Potential(joint, batch, chains)
    return known


def _chunks(joint: Joint, batch: Any, chains: int, limit: int | None) -> list[tuple[Any, float]]:
    """Pieces of the batch that fit, each with its share of the rows."""
    allowed = budget(joint) if limit is None else limit
    # The backward pass makes as much again; members of the joint are its chains.
    row = 2 * chains * activation_bytes(joint, TensorData(batch), 1) // (joint.num_members or 1)
    size = max(1, allowed // max(1, row))
    if size >= batch.size:
        return [(batch, 1.0)]
    axis = 1 if batch.per_member else 0
    logger.info("a gradient over all %d rows is taken in chunks of %d", batch.size, size)
    pieces = []
    for low in range(0, batch.size, size):
        length = min(size, batch.size - low)
        pieces.append((batch.map(lambda t, low=low, n=length: t.narrow(axis, low, n)), length / batch.size))
    return pieces
