"""One step of a method as a CUDA graph."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from posterity.inference.method import Info, Method, Target
from posterity.model.data import Batch
from posterity.numerics.random import Key, Streams, seed
from posterity.numerics.recording import nothing_read, recording
from posterity.numerics.workspace import own_workspaces
from posterity.storage import clone, leaves, mapped


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

    def __init__(self, method: Method, joint: Target, state: Any, batch: Batch, key: Key) -> None:
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
