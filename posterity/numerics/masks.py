"""Masks of dropout: drawn by key, given one by one, or none while the places are noted at which they are asked for."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor

from posterity.numerics.dropout import Masks
from posterity.numerics.random import Key


@dataclass(frozen=True)
class Site:
    """One call of dropout in a pass: its `rate`, and where the rows are in its mask.

    `shape` is the mask's for one row. The rows are on `axis`, `repeats` entries each, the entries of a row beside each
    other (the heads of an attention); `axis` None: the mask has no rows. `clear` is False where they cannot be found.
    `entries` of a row are multiplied by the mask, more than it has where units go together.
    """

    rate: float
    shape: tuple[int, ...]
    axis: int | None
    repeats: int = 1
    clear: bool = True
    entries: int = field(default=0, compare=False)

    @property
    def units(self) -> int:
        """How many units are dropped by themselves, in one row."""
        return prod(self.shape)

    def spread(self, keep: Tensor, shape: tuple[int, ...]) -> Tensor:
        """The mask of one row for all rows of a mask of `shape`."""
        if self.axis is None or self.repeats == 1:
            return keep
        times = [1] * len(shape)
        times[self.axis] = shape[self.axis] // self.repeats
        return keep.repeat(times)


class KeyedMasks(Masks):
    """Masks drawn under a key, call by call: one for each row, or (`shared`) the same for all rows.

    Numbers are drawn in float32 whatever the network's number type. With `relaxed` the mask of a learnt rate is a
    sigmoid of `temperature` in place of a step, which has a gradient in the rate.
    """

    def __init__(self, key: Key, sites: Sequence[Site], *, shared: bool, relaxed: float | None = None) -> None:
        """Take the key of the pass, the sites that a pass has, and the temperature where learnt rates are relaxed."""
        self._key, self._sites, self._shared, self._relaxed = key, sites, shared, relaxed

    def keep(self, index: int, shape: tuple[int, ...], rate: float | Tensor, like: Tensor) -> Tensor:
        """A fresh mask."""
        site = site_of(self._sites, index)
        if self._shared and not site.clear:
            raise ValueError(
                f"One mask for all rows: the rows of dropout number {index + 1}, a mask of shape {shape}, cannot be "
                "told. Use masks of their own for all rows."
            )
        drawn = shape
        if self._shared:
            drawn = tuple(site.repeats if axis == site.axis else length for axis, length in enumerate(shape))
        numbers = self._key.fold(index).uniform(drawn, torch.float32, like.device)
        if self._relaxed is not None and isinstance(rate, Tensor):
            keep = _relaxed(numbers.to(like.dtype), rate, self._relaxed)
        else:
            keep = (numbers >= rate).to(like.dtype)
        return site.spread(keep, shape) if self._shared else keep


def _relaxed(numbers: Tensor, rate: Tensor, temperature: float) -> Tensor:
    """The concrete distribution in place of the coin u >= p: sigmoid((logit u - logit p) / temperature)."""
    close = torch.finfo(torch.float32).eps
    noise = numbers.clamp(close, 1.0 - close)
    return torch.sigmoid((torch.logit(noise) - torch.logit(rate)) / temperature)


class NumberedMasks(Masks):
    """One mask for all rows, from numbers in [0, 1] drawn ahead: a unit stays if its number is not below the rate."""

    def __init__(self, numbers: Sequence[Tensor], sites: Sequence[Site]) -> None:
        """Take numbers of the site's shape for each site."""
        self._numbers, self._sites = numbers, sites

    def keep(self, index: int, shape: tuple[int, ...], rate: float | Tensor, like: Tensor) -> Tensor:
        """The mask of the numbers for this call."""
        site = site_of(self._sites, index)
        return site.spread((self._numbers[index] >= rate).to(like.dtype), shape)


class NoMasks(Masks):
    """Nothing is dropped; `calls` has the mask's shape, the rate and the number of entries of every call."""

    def __init__(self) -> None:
        """Begin with no calls."""
        self.calls: list[tuple[tuple[int, ...], float, int]] = []

    def keep(self, index: int, shape: tuple[int, ...], rate: float | Tensor, like: Tensor) -> None:
        """None."""
        self.calls.append((shape, float(rate), like.numel()))


class LayersAfter(Masks):
    """Nothing is dropped; `layers` has, for each call, the names of the weights that multiply its output.

    `elsewhere` has the calls whose output goes into other operations, too, than linear maps and convolutions by the
    weights given; `unmasked` the weights that act on anything else than one such output.
    """

    def __init__(self, weights: dict[str, Tensor]) -> None:
        """Take the very tensors that the network runs with, by name."""
        self.layers: dict[int, list[str]] = {}
        self.elsewhere: set[int] = set()
        self.unmasked: set[str] = set()
        self._names = {id(tensor): name for name, tensor in weights.items()}
        self._outputs: dict[int, tuple[int, Tensor]] = {}  # the tensors live as long as their ids are looked up

    def keep(self, index: int, shape: tuple[int, ...], rate: float | Tensor, like: Tensor) -> None:
        """None."""
        self.layers[index] = []

    def dropped(self, index: int, output: Tensor) -> None:
        """Remember the output."""
        self._outputs[id(output)] = index, output

    def sees(self, func: Any, args: Any, kwargs: Any) -> None:
        """Note a layer that takes a remembered output, or that something else does."""
        if getattr(func, "__name__", "") in ("__get__", "dim", "size"):
            return
        given = (*args, *kwargs.values())
        sites = [self._outputs[id(value)][0] for value in given if id(value) in self._outputs]
        name = self._names.get(id(args[1])) if func in _MAPS and len(args) > 1 else None
        if name is not None and len(sites) == 1 and (len(args) < 7 or args[6] == 1):  # no groups
            taken = any(name in names for names in self.layers.values())
            self.unmasked.update({name} if taken else ())
            self.layers[sites[0]].append(name)
        else:
            self.elsewhere.update(sites)
            self.unmasked.update(self._names[id(value)] for value in given if id(value) in self._names)


_MAPS: frozenset[Any] = frozenset(
    {torch.nn.functional.linear, torch.nn.functional.conv1d, torch.nn.functional.conv2d, torch.nn.functional.conv3d}
)


def site_of(sites: Sequence[Site], index: int) -> Site:
    """The site of call number `index`."""
    if index >= len(sites):
        raise RuntimeError(
            f"The network called for dropout more than the {len(sites)} times of the pass that was looked at first. "
            "Its calls must not depend on its inputs."
        )
    return sites[index]
