"""Synthetic toy data sets by name."""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from posterity.datasets.dataset import DataSet, LabelledData
from posterity.errors import shown, unknown
from posterity.numerics.random import Key

LINE_WEIGHT = 1.5
"""The true slope of `line`."""
LINE_BIAS = -0.5
"""The true intercept of `line`."""


def two_moons(num_data: int = 500, noise: float = 0.2, seed: int = 0, test: int = 2000) -> DataSet:
    """Two interleaved half circles of radius 1, one per class, with N(0, noise^2) noise in each coordinate.

    >>> two_moons().train.inputs.shape
    torch.Size([500, 2])
    """
    keys = _keys("two_moons", num_data, noise, seed, test, least=2)

    def part(count: int, key: Key) -> LabelledData:
        labels = _labels(count, 2, key)
        angle = math.pi * key.fold("angle").uniform((count,), dtype=torch.float64)
        upper = torch.stack((angle.cos(), angle.sin()), dim=1)  # (N, 2)
        lower = torch.stack((1 - angle.cos(), 0.5 - angle.sin()), dim=1)
        clean = torch.where(labels[:, None] == 0, upper, lower)
        return LabelledData(_noisy(clean, noise, key), labels)

    train, held_out = map(part, (num_data, test), keys)
    return DataSet("two-moons", "classification", train, held_out, ("upper", "lower"))


def blobs(num_data: int = 300, noise: float = 0.6, seed: int = 0, test: int = 2000) -> DataSet:
    """Three isotropic Gaussians of standard deviation `noise`, one per class, centred on a circle of radius 2."""
    keys = _keys("blobs", num_data, noise, seed, test, least=3)
    direction = math.pi / 2 + 2 * math.pi / 3 * torch.arange(3, dtype=torch.float64)
    centres = 2 * torch.stack((direction.cos(), direction.sin()), dim=1)  # (3, 2)

    def part(count: int, key: Key) -> LabelledData:
        labels = _labels(count, 3, key)
        return LabelledData(_noisy(centres[labels], noise, key), labels)

    train, held_out = map(part, (num_data, test), keys)
    return DataSet("blobs", "classification", train, held_out, ("top", "left", "right"))


def sine(num_data: int = 100, noise: float = 0.3, seed: int = 0, test: int = 500) -> DataSet:
    """y = sin(x) + x + N(0, noise^2) with x in [-4, -1] and [1, 4], tested on an even grid over [-6, 6].

    The test rows cover the gap in the middle and extrapolate at both ends, where epistemic uncertainty matters.
    """
    keys = _keys("sine", num_data, noise, seed, test, least=1)
    return _gapped("sine", lambda x: x.sin() + x, (4.0, 6.0), num_data, noise, test, keys)


def waves(num_data: int = 40, noise: float = 0.2, seed: int = 0, test: int = 500) -> DataSet:
    """y = sin(1.5 x) + N(0, noise^2) with x in [-3, -1] and [1, 3], tested on an even grid over [-4.5, 4.5].

    Few rows with a gap between them, and no trend for a line to find: what a point estimate says in the gap and beyond
    the ends is a guess.
    """
    keys = _keys("waves", num_data, noise, seed, test, least=1)
    return _gapped("waves", lambda x: (1.5 * x).sin(), (3.0, 4.5), num_data, noise, test, keys)


def _gapped(
    name: str,
    function: Callable[[Tensor], Tensor],
    ends: tuple[float, float],
    num_data: int,
    noise: float,
    test: int,
    keys: tuple[Key, Key],
) -> DataSet:
    """A function of x with noise: training rows at 1 to `ends[0]` on either side of 0, test rows on a grid."""
    key, test_key = keys

    def part(x: Tensor, key: Key) -> LabelledData:
        return LabelledData(x.float(), _noisy(function(x), noise, key))

    distance = 1 + (ends[0] - 1) * key.fold("distance").uniform((num_data, 1), dtype=torch.float64)
    side = 1 - 2 * _labels(num_data, 2, key)[:, None]  # both sides of the gap have the same number of rows
    grid = torch.linspace(-ends[1], ends[1], test, dtype=torch.float64)[:, None]
    return DataSet(name, "regression", part(side * distance, key), part(grid, test_key))


def line(num_data: int = 50, noise: float = 0.5, seed: int = 0, test: int = 500) -> DataSet:
    """y = LINE_WEIGHT * x + LINE_BIAS + N(0, noise^2) for x uniform on [-2, 2): the exact posterior is known."""
    keys = _keys("line", num_data, noise, seed, test, least=1)

    def part(count: int, key: Key) -> LabelledData:
        x = 4 * key.fold("position").uniform((count, 1), dtype=torch.float64) - 2
        return LabelledData(x.float(), _noisy(LINE_WEIGHT * x + LINE_BIAS, noise, key))

    train, held_out = map(part, (num_data, test), keys)
    return DataSet("line", "regression", train, held_out)


def _keys(name: str, num_data: int, noise: float, seed: int, test: int, least: int) -> tuple[Key, Key]:
    """Check the arguments of a toy data set, and return the keys of its training and test rows."""
    for argument, value in (("num_data", num_data), ("test", test)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"{name}: {argument} must be a whole number of at least {least}. Got {shown(value)}.")
    if not isinstance(noise, (int, float)) or not math.isfinite(noise) or noise < 0:
        raise ValueError(f"{name}: noise must be a standard deviation, 0 or more. Got {shown(noise)}.")
    key = Key(seed).fold(name)
    return key.fold("train"), key.fold("test")


def _labels(count: int, num_classes: int, key: Key) -> Tensor:
    """Return labels (N,) in random order whose counts differ by at most one."""
    return (torch.arange(count) % num_classes)[key.fold("order").permutation(count)]


def _noisy(clean: Tensor, noise: float, key: Key) -> Tensor:
    """Add normal noise to `clean` in float64; returns float32."""
    return (clean + noise * key.fold("noise").normal(tuple(clean.shape), dtype=torch.float64)).float()


TOYS: Mapping[str, Callable[..., DataSet]] = MappingProxyType(
    {"two-moons": two_moons, "sine": sine, "line": line, "blobs": blobs, "waves": waves}
)
"""The toy data sets by name; each function takes a number of rows, the noise and a seed."""


def load(name: str, seed: int = 0) -> DataSet:
    """Return the toy data set `name` at its default size.

    >>> load("blobs").classes
    ('top', 'left', 'right')
    """
    if name not in TOYS:
        raise ValueError(unknown("data set", name, TOYS))
    return TOYS[name](seed=seed)
