"""Randomness by key: the same (seed, purpose, step) gives the same numbers, whatever ran before."""

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Key:
    """A point in the tree of random streams that grows from one seed.

    A key never changes. `fold` gives a child key, and `generator` a fresh `torch.Generator` that starts
    at the key's own number; drawing from it twice therefore gives the same numbers twice. Resumed and
    uninterrupted runs draw alike because step t always uses `key.fold(t)`. Keys have 63 bits, of which a
    generator on the CPU uses the lowest 32: among a million steps some hundred pairs draw alike.

    >>> Key(0).fold("noise").fold(3) == Key(0).fold("noise").fold(3)
    True
    >>> bool(torch.equal(Key(7).normal((2,)), Key(7).normal((2,))))
    True
    """

    seed: int

    def fold(self, label: int | str) -> "Key":
        """The child key of this one under `label`."""
        digest = hashlib.blake2b(f"{self.seed}/{label!r}".encode(), digest_size=8).digest()
        return Key(int.from_bytes(digest, "little") >> 1)  # torch seeds are signed 64-bit

    def generator(self, device: torch.device | str | None = None) -> torch.Generator:
        """A new generator on `device` (torch's default device if None), seeded by this key."""
        return torch.Generator(device=device or torch.get_default_device()).manual_seed(self.seed)

    def normal(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> Tensor:
        """Standard normal numbers of `shape`."""
        return torch.randn(shape, dtype=dtype, device=device, generator=self.generator(device))

    def uniform(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> Tensor:
        """Numbers of `shape` uniform on [0, 1)."""
        return torch.rand(shape, dtype=dtype, device=device, generator=self.generator(device))

    def permutation(self, count: int, device: torch.device | str | None = None) -> Tensor:
        """The numbers 0 .. count - 1 in random order."""
        return torch.randperm(count, device=device, generator=self.generator(device))
