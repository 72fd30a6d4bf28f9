"""Quicker steps: potentials compiled to machine code, steps recorded as CUDA graphs."""

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, TypeAlias
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from posterity.inference.memory import activation_bytes, device_memory
from posterity.inference.method import Effort, Info, Method
from posterity.model import Joint, Problem
from posterity.model.batch import batch_tensors
from posterity.model.data import Batch, TensorData
from posterity.numerics.compiled import Compiled, nothing_read, recording
from posterity.numerics.random import Key, Streams, seed
from posterity.numerics.workspace import own_workspaces
from posterity.storage import clone, leaves, mapped

logger = logging.getLogger("posterity")

BUDGET = 2**30  # bytes of activations at once on the CPU
_SHARE = 0.25  # of the memory of a GPU


Chunk: TypeAlias = tuple[Batch | None, float]  # rows, and their share of all


class _Own(threading.local):
    """What each thread has for itself: runs side by side may have one problem, and different rows for it."""

    def __init__(self) -> None:
        self.effort: Effort = "none"
        self.shared: dict[object, Compiled] = {}  # of functions that no density is part of
        self.known: WeakKeyDictionary[Problem, dict[int, Potential]] = WeakKeyDictionary()  # by the number of chains


_OWN = _Own()


@contextmanager
def accelerated(effort: Effort) -> Iterator[None]:
    """Work handed to `Potential.run` inside `with` is recorded as CUDA graphs, or compiled as well."""
    before, _OWN.effort = _OWN.effort, effort
    try:
        yield
    finally:
        _OWN.effort = before


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

    def __init__(self, joint: Problem, batch: Batch | None, chains: int, limit: int | None = None) -> None:
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
        return _OWN.effort != "none"

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """`function(*arguments)`, compiled where that is wanted."""
        if not self.accelerated:
            return function(*arguments)
        own = any(argument is self for argument in arguments)
        table = self._compiled if own else _OWN.shared
        kind = (function, _OWN.effort, self._names if own else ())
        if kind not in table:
            work = partial(self._with_rows, function) if own else function
            table[kind] = Compiled(work, held=own, fused=_OWN.effort == "compiled")
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


def budget(joint: Problem) -> int:
    """Bytes that the activations of a gradient may take."""
    memory = device_memory(joint.device)
    return int(_SHARE * memory) if joint.device.type == "cuda" and memory else BUDGET


def potential(joint: Problem, batch: Batch | None, chains: int) -> Potential:
    """The potential of the problem on these rows, made once."""
    table = _OWN.known.setdefault(joint, {})
    known = table.get(chains)
    if known is None:
        known = table[chains] = Potential(joint, batch, chains)
    elif known.batch is not batch:
        known.take(batch)
    return known


def doubt(joint: Problem) -> None:
    """Look at the next calls whether what was compiled for the problem is still what it says.

    A density reads what it likes: variables of a notebook may have other values in the next run.
    """
    for known in _OWN.known.get(joint, {}).values():
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


def shapes(value: Any) -> tuple[object, ...]:
    """What a recording depends on: the shapes of all that a state or batch holds, and what is no number or tensor."""
    return tuple((path, _shape(leaf)) for path, leaf in leaves(value).items())


def _shape(leaf: Any) -> object:
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.dtype, leaf.device
    return "count" if _is_count(leaf) else leaf


def _is_count(leaf: Any) -> bool:
    return type(leaf) is int


class Graph:
    """A step from a state of certain shapes, on a batch of certain shapes, recorded to be played again.

    The graph reads and writes fixed memory: the tensors of the state it is made from, into which it puts the next
    state where that has the same shapes. Whole numbers in the state, which count steps, are tensors inside the graph
    and numbers outside. Random numbers come from generators that are seeded before each play.
    """

    def __init__(self, method: Method, joint: Problem, state: Any, batch: Batch, key: Key) -> None:
        """Record the step from `state`, which is not taken by that."""
        device = joint.device
        given = leaves(state)
        self._counts = {path: leaf for path, leaf in given.items() if _is_count(leaf)}
        self._inputs = {
            path: torch.tensor(float(leaf), dtype=torch.float64, device=device) if _is_count(leaf) else leaf
            for path, leaf in given.items()
        }
        inputs = iter(self._inputs.values())
        lifted = mapped(lambda _: next(inputs), state)
        self._batch = clone(batch)
        self._last_batch: Batch | None = None
        # A plain step on copies tells which random numbers are drawn, and by how much the counts rise.
        with Streams(key) as streams, nothing_read():
            after, _ = method.step(joint, clone(lifted), self._batch, key)
        self._streams = streams.asked
        for stream in self._streams:
            if stream.device.type != "cuda":
                raise RuntimeError(f"a step draws random numbers on the {stream.device.type}")
        reached = leaves(after)
        self._rises = {
            path: round(float(reached[path])) - count for path, count in self._counts.items() if path in reached
        }
        self.kind_after = shapes(self._with_counts(after, reached))
        self._generators = [torch.Generator(device=device) for _ in self._streams]
        self._graph = torch.cuda.CUDAGraph()
        for generator in self._generators:
            self._graph.register_generator_state(generator)
        with own_workspaces(), recording(self._graph):
            with Streams(key, self._streams, self._generators):
                self._after, info = method.step(joint, lifted, self._batch, key)
            self._settle()
            self._fixed = {name: value for name, value in info.items() if not isinstance(value, Tensor)}
            self._names = [name for name in info if name not in self._fixed]
            tensors = [torch.as_tensor(info[name]).double() for name in self._names]
            self._numbers = torch.stack(tensors) if tensors else None

    def _settle(self) -> None:
        """Put the next state into the memory of the one before, where it fits."""
        tensors = {path: leaf for path, leaf in self._inputs.items() if isinstance(leaf, Tensor) and leaf.numel()}
        own = {leaf.untyped_storage().data_ptr(): path for path, leaf in tensors.items()}
        self._result: dict[str, Any] = {}
        for path, leaf in leaves(self._after).items():
            place = self._inputs.get(path)
            if isinstance(leaf, Tensor) and leaf is not place:
                if leaf.numel() and own.get(leaf.untyped_storage().data_ptr(), path) != path:
                    raise RuntimeError(f"the next state has {path} in the memory of another tensor of the last one")
                if isinstance(place, Tensor) and place.shape == leaf.shape and place.dtype == leaf.dtype:
                    leaf = place.copy_(leaf)
            self._result[path] = leaf

    def play(self, state: Any, batch: Batch, key: Key) -> tuple[Any, Info]:
        """The step from `state` on `batch`; what it gives is good until the next play."""
        for path, leaf in leaves(state).items():
            place = self._inputs[path]
            if _is_count(leaf):
                if self._counts[path] != leaf:
                    place.fill_(leaf)
                self._counts[path] = leaf
            elif leaf is not place and isinstance(leaf, Tensor):
                place.copy_(leaf)
        if batch is not self._last_batch:
            for place, leaf in zip(leaves(self._batch).values(), leaves(batch).values(), strict=True):
                if isinstance(leaf, Tensor):
                    place.copy_(leaf)
            self._last_batch = batch
        seed(self._streams, self._generators, key)
        self._graph.replay()
        return self._next_state(), self._info()

    def _next_state(self) -> Any:
        for path, rise in self._rises.items():
            self._counts[path] += rise
        return self._with_counts(self._after, self._result)

    def _with_counts(self, state: Any, parts: Mapping[str, Any]) -> Any:
        """The state, made of these parts, with its counts as numbers."""
        each = iter([self._counts[path] if path in self._rises else leaf for path, leaf in parts.items()])
        return mapped(lambda _: next(each), state)

    def _info(self) -> Info:
        if self._numbers is None:
            return self._fixed
        return {**self._fixed, **dict(zip(self._names, self._numbers.clone().unbind(0), strict=True))}


Acceleration: TypeAlias = Literal["auto", "off"]

_PLAIN = 3  # steps of each kind before it is recorded: libraries set themselves up in the first
_MOST_KINDS = 4  # kinds of steps, by the shapes of state and batch; more are not worth their memory


class Stepper:
    """The steps of a run, recorded and played where the method and the device allow, else called.

    Takes the method, the problem and `accelerate`: "auto" records on CUDA and lets samplers compile, "off" never does.
    A step that cannot be
    recorded is called from then on, which is said once with the reason. The numbers are those of plain steps, up to
    the rounding of kernels that add up in another order each time. A recording cannot see memory of the CPU that a
    kernel reads (batched solvers of cuBLAS pass pointers that way): switch it off for modules that solve equations.
    """

    def __init__(self, method: Method, joint: Problem, accelerate: Acceleration) -> None:
        """Nothing recorded yet."""
        self._method, self._joint = method, joint
        traits, auto = method.traits, accelerate == "auto"
        self._wanted = auto and traits.recordable and joint.device.type == "cuda"
        self._effort = traits.effort if auto else None
        doubt(joint)
        self._seen: dict[object, int] = {}
        self._graphs: dict[object, Graph] = {}
        self._last: tuple[Any, object] = (None, None)  # a state that came out of a graph, and its shapes

    def __call__(self, state: Any, batch: Batch, key: Key) -> tuple[Any, Info]:
        """`method.step`."""
        if self._effort is not None and (effort := self._effort(self._joint, state)) != "none":
            with accelerated(effort):
                return self._method.step(self._joint, state, batch, key)
        if not self._wanted:
            return self._method.step(self._joint, state, batch, key)
        known, kind = self._last
        kind = (kind if known is state else shapes(state), shapes(batch))
        graph = self._graphs.get(kind)
        if graph is None:
            count = self._seen[kind] = self._seen.get(kind, 0) + 1
            if count <= _PLAIN:
                return self._method.step(self._joint, state, batch, key)
            graph = self._recorded(kind, state, batch, key)
            if graph is None:
                return self._method.step(self._joint, state, batch, key)
        state, info = graph.play(state, batch, key)
        self._last = state, graph.kind_after
        return state, info

    def _recorded(self, kind: object, state: Any, batch: Batch, key: Key) -> Graph | None:
        """The graph of a step, or None with a word about the reason, which ends all recording."""
        if len(self._graphs) == _MOST_KINDS:
            reason = f"states and batches come in more than {_MOST_KINDS} shapes"
        else:
            try:
                graph = self._graphs[kind] = Graph(self._method, self._joint, state, batch, key)
                logger.info("the steps are recorded as a CUDA graph")
                return graph
            except Exception as error:  # whatever a user's module does; the plain step raises it if it is at fault
                reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        self._wanted = False
        logger.warning("the steps are not recorded as a CUDA graph, and run one kernel at a time: %s", reason)
        return None
