"""The toy data sets by name."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from posterity.datasets.dataset import DataSet
from posterity.datasets.toys import blobs, line, sine, two_moons
from posterity.errors import unknown

TOYS: Mapping[str, Callable[..., DataSet]] = MappingProxyType(
    {"two-moons": two_moons, "sine": sine, "line": line, "blobs": blobs}
)


def load(name: str, seed: int = 0) -> DataSet:
    """The toy data set of this name, of its usual size.

    >>> load("blobs").classes
    ('top', 'left', 'right')
    """
    if name not in TOYS:
        raise ValueError(unknown("data set", name, TOYS))
    return TOYS[name](seed=seed)
