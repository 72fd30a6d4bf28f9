"""Randomness by key: the same (seed, purpose, step) gives the same numbers, whatever ran before."""

import hashlib
import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor


class GlobalStates(NamedTuple):
    """States of `random`, of numpy's global generator, and of generators of torch."""

    of_python: Any
    of_numpy: Any
    of_torch: list[Tensor]

    @classmethod
    def now(cls, generators: Sequence[torch.Generator]) -> "GlobalStates":
        """Return the present states, with those of these generators."""
        return cls(random.getstate(), np.random.get_state(), [generator.get_state() for generator in generators])

    def restore(self, generators: Sequence[torch.Generator]) -> None:
        """Set the states of `random`, of numpy and of these generators."""
        random.setstate(self.of_python)
        np.random.set_state(self.of_numpy)
        for generator, state in zip(generators, self.of_torch, strict=True):
            generator.set_state(state)

    def equals(self, other: "GlobalStates") -> bool:
        """Return whether nothing was drawn between these states and the others."""
        numpy = all(np.array_equal(own, its) for own, its in zip(self.of_numpy, other.of_numpy, strict=True))
        return self.of_python == other.of_python and numpy and all(map(torch.equal, self.of_torch, other.of_torch))


def global_generators(device: torch.device) -> list[torch.Generator]:
    """Return torch's generators that code on this device draws from if it names none."""
    if device.type != "cuda":
        return [torch.default_generator]
    index = torch.cuda.current_device() if device.index is None else device.index
    return [torch.default_generator, torch.cuda.default_generators[index]]


class _Active(threading.local):
    streams: "Streams | None" = None


_ACTIVE = _Active()


@dataclass(frozen=True, slots=True)
class Key:
    """A point in the tree of random streams that grows from one seed.

    A key never changes. `fold` gives a child key, and `generator` a new `torch.Generator` seeded by the key, so the
    same key always draws the same numbers. Resumed and uninterrupted runs agree because step t uses `key.fold(t)`. Keys
    have 63 bits, of which a CPU generator uses the lowest 32: among a million steps about a hundred pairs collide.

    >>> Key(0).fold("noise").fold(3) == Key(0).fold("noise").fold(3)
    True
    >>> bool(torch.equal(Key(7).normal((2,)), Key(7).normal((2,))))
    True
    """

    seed: int

    def fold(self, label: int | str) -> "Key":
        """The child key of this one under `label`."""
        digest = hashlib.blake2b(f"{self.seed}/{label!r}".encode(), digest_size=8).digest()
        child = Key(int.from_bytes(digest, "little") >> 1)  # torch seeds are signed 64-bit
        if (streams := _ACTIVE.streams) is not None:
            streams.folded(self, label, child)
        return child

    def generator(self, device: torch.device | str | None = None) -> torch.Generator:
        """A new generator on `device` (torch's default device if None), seeded by this key."""
        if (streams := _ACTIVE.streams) is not None:
            return streams.generator(self, torch.device(device or torch.get_default_device()))
        return torch.Generator(device=device or torch.get_default_device()).manual_seed(self.seed)

    def normal(
        self, shape: tuple[int, ...], dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> Tensor:
        """Standard normal numbers of `shape`."""
        return torch.randn(shape, dtype=dtype, device=device, generator=self.generator(device))

    def uniform(
        self, shape: tuple[int, ...], dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> Tensor:
        """Numbers of `shape` uniform on [0, 1)."""
        return torch.rand(shape, dtype=dtype, device=device, generator=self.generator(device))

    def permutation(self, count: int, device: torch.device | str | None = None) -> Tensor:
        """The numbers 0 .. count - 1 in random order."""
        return torch.randperm(count, device=device, generator=self.generator(device))


class Stream(NamedTuple):
    """A requested generator: the labels folded into the key of the work, and the device."""

    labels: tuple[int | str, ...]
    device: torch.device


class Streams:
    """Records the generators that work under `key` requests; with `wanted` streams, hands out these `generators`.

    It serves work that is recorded and replayed: before each replay `seed` seeds the generators from that time's key.

    >>> key = Key(3)
    >>> with Streams(key) as first:
    ...     numbers = key.fold("noise").normal((2,))
    >>> own = torch.Generator()
    >>> with Streams(key, first.asked, [own]):
    ...     seed(first.asked, [own], Key(4))
    ...     again = key.fold("noise").normal((2,))
    >>> bool((again == Key(4).fold("noise").normal((2,))).all())
    True
    """

    def __init__(self, key: Key, wanted: Sequence[Stream] = (), generators: Sequence[torch.Generator] = ()) -> None:
        self.asked: list[Stream] = []
        self._labels: dict[Key, tuple[int | str, ...]] = {key: ()}
        self._given = list(zip(wanted, generators, strict=True))

    def __enter__(self) -> "Streams":
        _ACTIVE.streams = self
        return self

    def __exit__(self, *_: object) -> None:
        _ACTIVE.streams = None

    def folded(self, key: Key, label: int | str, child: Key) -> None:
        """Note the parent and label of a key."""
        if key in self._labels:
            self._labels[child] = (*self._labels[key], label)

    def generator(self, key: Key, device: torch.device) -> torch.Generator:
        """A new generator seeded by the key, or the next given one, whose stream must be the same."""
        if key not in self._labels:
            raise RuntimeError("A step drew random numbers by a key that is not its own.")
        stream = Stream(self._labels[key], device)
        self.asked.append(stream)
        if not self._given:
            return torch.Generator(device=device).manual_seed(key.seed)
        wanted, generator = self._given[len(self.asked) - 1] if len(self.asked) <= len(self._given) else (None, None)
        if wanted != stream or generator is None:
            raise RuntimeError("A step drew other random numbers than the one before.")
        return generator


def seed(streams: Sequence[Stream], generators: Sequence[torch.Generator], key: Key) -> None:
    """Seed the generators of the streams as work under `key` would."""
    for stream, generator in zip(streams, generators, strict=True):
        own = key
        for label in stream.labels:
            own = own.fold(label)
        generator.manual_seed(own.seed)
