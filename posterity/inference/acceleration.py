"""Accelerated steps: potentials compiled to machine code, steps recorded as CUDA graphs."""

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, TypeAlias, TypeVar
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from posterity.inference.memory import activation_bytes, device_memory
from posterity.inference.method import Effort, Info, Method
from posterity.model import Joint, Problem
from posterity.model.batch import batch_tensors
from posterity.model.data import Batch, Data, TensorData
from posterity.numerics.compiled import Compiled, nothing_read, recording
from posterity.numerics.random import Key, Streams, seed
from posterity.numerics.workspace import own_workspaces
from posterity.storage import clone, leaves, mapped

logger = logging.getLogger("posterity")

BUDGET = 2**30  # bytes of activations at once on the CPU
_SHARE = 0.25  # of the memory of a GPU for activations

T = TypeVar("T")
Work: TypeAlias = Callable[[Problem, Any, Batch, Key], tuple[Any, Info]]
Chunk: TypeAlias = tuple[Batch | None, float]  # rows, and their share of all rows


class _Own(threading.local):
    """The state of each thread: concurrent runs may share a problem, and have different rows."""

    def __init__(self) -> None:
        self.effort: Effort = "none"
        self.shared: dict[object, Compiled] = {}  # of functions that do not depend on a density
        self.known: WeakKeyDictionary[Problem, dict[int, Potential]] = WeakKeyDictionary()  # by number of chains


_OWN = _Own()


@contextmanager
def accelerated(effort: Effort) -> Iterator[None]:
    """Record work handed to `Potential.run` inside the context, on CUDA as graphs, or compile it as well."""
    before, _OWN.effort = _OWN.effort, effort
    try:
        yield
    finally:
        _OWN.effort = before


class Potential:
    """The log density (C,) and its gradient (C, P) at theta (C, P) over all rows of `batch`, exact.

    Networks run in evaluation mode. Rows are processed in chunks whose activations, for all chains, stay within
    `limit` bytes (None: 1 GiB on the CPU, a quarter of the memory of a GPU).

    >>> import torch, posterity as po
    >>> density = po.Density(lambda x: -0.5 * x.square().sum(), {"x": (2,)})
    >>> value, grad = Potential(density, None, chains=1)(torch.ones(1, 2))
    >>> value, grad
    (tensor([-1.]), tensor([[-1., -1.]]))
    """

    def __init__(self, joint: Problem, batch: Batch | None, chains: int, limit: int | None = None) -> None:
        self.chains, self._limit = chains, limit
        self._joint = ref(joint)  # weak: a problem is freed together with its potential
        self._compiled: dict[object, Compiled] = {}
        self.take(batch)

    def take(self, batch: Batch | None) -> None:
        """Continue with these rows; what was compiled serves rows of the same shapes."""
        joint: Any = self._joint()
        if batch is not None and not batch.checked and not batch.targets.is_floating_point():
            batch = joint.check(batch)  # compiled code cannot look at labels
        self.batch = batch
        self._chunks = [(batch, 1.0)] if batch is None else _chunks(joint, batch, self.chains, self._limit)
        self._tensors: tuple[Tensor, ...] = () if batch is None else batch_tensors(batch)
        self._names = () if batch is None else (batch.per_member, batch.complete, *batch.tensors)  # their meaning

    def __call__(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Return value and gradient."""
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
        """Whether work is currently recorded or compiled."""
        return _OWN.effort != "none"

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return `function(*arguments)`, recorded or compiled inside `accelerated`."""
        if not self.accelerated:
            return function(*arguments)
        own = any(argument is self for argument in arguments)
        table = self._compiled if own else _OWN.shared
        kind = (function, _OWN.effort, self._names if own else ())
        if kind not in table:
            work = partial(self._with_rows, function) if own else function
            table[kind] = Compiled(work, held=own, fused=_OWN.effort == "compiled")
        return table[kind](self._tensors, *arguments) if own else table[kind](*arguments)

    def run_light(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return `function(*arguments)`, some tens of operations: on a CPU they take less time than to compile them."""
        return self.run(function, *arguments) if self._on_cuda else function(*arguments)

    def lasting(self, result: T) -> T:
        """Return a result of `run` that the next call does not overwrite, as recordings on CUDA do."""
        return clone(result) if self._on_cuda else result

    @property
    def _on_cuda(self) -> bool:
        problem = self._joint()
        return problem is None or problem.device.type == "cuda"

    def doubt(self) -> None:
        """Compare compiled work with the problem again at its next calls."""
        for compiled in self._compiled.values():
            compiled.doubt()

    def _with_rows(self, function: Callable[..., Any], tensors: tuple[Tensor, ...], *arguments: Any) -> Any:
        """Call the function with the rows replaced by these tensors."""
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
    """Return the bytes that the activations of a gradient may take."""
    memory = device_memory(joint.device)
    return int(_SHARE * memory) if joint.device.type == "cuda" and memory else BUDGET


def potential(joint: Problem, batch: Batch | None, chains: int) -> Potential:
    """Return the potential of the problem on these rows, which is made once."""
    table = _OWN.known.setdefault(joint, {})
    known = table.get(chains)
    if known is None:
        known = table[chains] = Potential(joint, batch, chains)
    elif known.batch is not batch:
        known.take(batch)
    return known


def doubt(joint: Problem) -> None:
    """Compare what was compiled for the problem with the problem again, at the next calls.

    A density may read global variables, which may have changed since the last run.
    """
    for known in _OWN.known.get(joint, {}).values():
        known.doubt()


def rows_at_once(joint: Problem, data: Data, chains: int, limit: int | None = None) -> int:
    """Return how many rows a gradient of the chains takes at a time, within `limit` bytes (None: `budget`)."""
    # The backward pass makes as much again; members of the joint are its chains.
    row = 2 * chains * activation_bytes(joint, data, 1) // (joint.num_members or 1)
    return max(1, (budget(joint) if limit is None else limit) // max(1, row))


def _chunks(joint: Joint, batch: Batch, chains: int, limit: int | None) -> list[Chunk]:
    """Split the batch into chunks that fit into memory, each with its share of the rows."""
    pieces = _pieces(batch, rows_at_once(joint, TensorData(batch), chains, limit))
    if len(pieces) > 1:
        logger.info("a gradient over all %d rows is taken in %d pieces", batch.size, len(pieces))
    return pieces


def _pieces(batch: Batch, size: int) -> list[Chunk]:
    """Split the batch into chunks of `size` rows, each with its share of the rows."""
    if size >= batch.size:
        return [(batch, 1.0)]
    axis = 1 if batch.per_member else 0
    pieces: list[Chunk] = []
    for low in range(0, batch.size, size):
        length = min(size, batch.size - low)
        pieces.append((batch.map(partial(torch.narrow, dim=axis, start=low, length=length)), length / batch.size))
    return pieces


def shapes(value: Any) -> tuple[object, ...]:
    """Return what a recording depends on: shape, dtype and device of all tensors, and leaves that are not numbers."""
    return tuple((path, _shape(leaf)) for path, leaf in leaves(value).items())


def _shape(leaf: Any) -> object:
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.dtype, leaf.device
    return "count" if _is_count(leaf) else leaf


def _is_count(leaf: Any) -> bool:
    return type(leaf) is int


class Graph:
    """A CUDA graph of a step, for states and batches of fixed shapes.

    The graph reads and writes fixed memory: the tensors of the state it is made from, into which it writes the next
    state where the shapes agree. Whole numbers in the state, which count steps, are tensors inside the graph and
    numbers outside. Random numbers come from generators that are seeded before each replay.
    """

    def __init__(self, step: Work, joint: Problem, state: Any, batch: Batch, key: Key) -> None:
        """Record the step from `state`, without taking it."""
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
        # A plain step on copies shows which random numbers are drawn, and by how much the counts rise.
        with Streams(key) as streams, nothing_read():
            after, _ = step(joint, clone(lifted), self._batch, key)
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
                self._after, info = step(joint, lifted, self._batch, key)
            self._settle()
            self._fixed = {name: value for name, value in info.items() if not isinstance(value, Tensor)}
            self._names = [name for name in info if name not in self._fixed]
            tensors = [torch.as_tensor(info[name]).double() for name in self._names]
            self._numbers = torch.stack(tensors) if tensors else None

    def _settle(self) -> None:
        """Write the next state into the memory of the last one, where shapes and dtypes agree."""
        tensors = {path: leaf for path, leaf in self._inputs.items() if isinstance(leaf, Tensor) and leaf.numel()}
        own = {leaf.untyped_storage().data_ptr(): path for path, leaf in tensors.items()}
        self._result: dict[str, Any] = {}
        for path, leaf in leaves(self._after).items():
            target = self._inputs.get(path)
            if isinstance(leaf, Tensor) and leaf is not target:
                if leaf.numel() and own.get(leaf.untyped_storage().data_ptr(), path) != path:
                    raise RuntimeError(f"the next state has {path} in the memory of another tensor of the last one")
                if isinstance(target, Tensor) and target.shape == leaf.shape and target.dtype == leaf.dtype:
                    leaf = target.copy_(leaf)
            self._result[path] = leaf

    def play(self, state: Any, batch: Batch, key: Key) -> tuple[Any, Info]:
        """Replay the step from `state` on `batch`; the result is valid until the next replay."""
        for path, leaf in leaves(state).items():
            target = self._inputs[path]
            if _is_count(leaf):
                if self._counts[path] != leaf:
                    target.fill_(leaf)
                self._counts[path] = leaf
            elif leaf is not target and isinstance(leaf, Tensor):
                target.copy_(leaf)
        if batch is not self._last_batch:
            for target, leaf in zip(leaves(self._batch).values(), leaves(batch).values(), strict=True):
                if isinstance(leaf, Tensor):
                    target.copy_(leaf)
            self._last_batch = batch
        seed(self._streams, self._generators, key)
        self._graph.replay()
        for path, rise in self._rises.items():
            self._counts[path] += rise
        info: dict[str, Tensor | float] = dict(self._fixed)
        if self._numbers is not None:
            info.update(zip(self._names, self._numbers.clone().unbind(0), strict=True))
        return self._with_counts(self._after, self._result), info

    def _with_counts(self, state: Any, parts: Mapping[str, Any]) -> Any:
        """Return the state made of these parts, with its counts as numbers."""
        each = iter([self._counts[path] if path in self._rises else leaf for path, leaf in parts.items()])
        return mapped(lambda _: next(each), state)


Acceleration: TypeAlias = Literal["auto", "fastest", "off"]

_PLAIN = 3  # plain steps of each kind before it is recorded: libraries initialise themselves in the first
_MOST_KINDS = 4  # most kinds of steps, by the shapes of state and batch, since each graph takes memory


class Stepper:
    """The steps of a run, replayed as CUDA graphs where the method and the device allow, else called.

    Takes the method, the problem and `accelerate`: "off" never records, others do on CUDA, and let samplers compile.
    A step that cannot be recorded is called from then on, with one warning that gives the reason. The numbers equal
    plain steps up to the rounding of kernels with a random order of summation. A graph does not see CPU memory
    that a kernel reads (batched solvers of cuBLAS pass pointers so): use "off" for modules that solve equations. Steps
    that several processes share are called, too: a graph cannot wait for another process.
    """

    def __init__(self, method: Method, joint: Problem, accelerate: Acceleration) -> None:
        self._method, self._joint = method, joint
        shared = joint.network is not None and joint.network.sharing is not None
        traits, auto = method.traits, accelerate != "off" and not shared
        self._wanted = auto and traits.recordable and joint.device.type == "cuda"
        self._effort = traits.effort if auto else None
        doubt(joint)
        self._seen: dict[object, int] = {}
        self._graphs: dict[object, Graph] = {}
        self._last: tuple[Any, object] = (None, None)  # a state returned by a graph, and its shapes

    def __call__(self, state: Any, batch: Batch, key: Key) -> tuple[Any, Info]:
        """Return `method.step(joint, state, batch, key)`."""
        if self._effort is not None and (effort := self._effort(self._joint, state)) != "none":
            with accelerated(effort):
                return self._method.step(self._joint, state, batch, key)
        step = self._method.recordable(state) if self._wanted else None
        if step is None:
            return self._method.step(self._joint, state, batch, key)
        known, kind = self._last
        kind = (step.__name__, kind if known is state else shapes(state), shapes(batch))
        graph = self._graphs.get(kind)
        if graph is None:
            count = self._seen[kind] = self._seen.get(kind, 0) + 1
            if count <= _PLAIN:
                return self._method.step(self._joint, state, batch, key)
            graph = self._recorded(step, kind, state, batch, key)
            if graph is None:
                return self._method.step(self._joint, state, batch, key)
        state, info = graph.play(state, batch, key)
        self._last = state, graph.kind_after
        return state, info

    def _recorded(self, step: Work, kind: object, state: Any, batch: Batch, key: Key) -> Graph | None:
        """Record a step and return its graph; None, with a warning, ends all recording."""
        if len(self._graphs) == _MOST_KINDS:
            reason = f"states and batches come in more than {_MOST_KINDS} shapes"
        else:
            try:
                graph = self._graphs[kind] = Graph(step, self._joint, state, batch, key)
                logger.info("the steps are recorded as a CUDA graph")
                return graph
            except Exception as error:  # any error of a user's module; the plain step raises it again if it is real
                reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        self._wanted = False
        logger.warning("the steps are not recorded as a CUDA graph, and run one kernel at a time: %s", reason)
        return None
