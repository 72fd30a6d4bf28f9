"""Images of noise under the name of a real data set."""

import torch

from posterity.datasets import DataSet, LabelledData
from posterity.numerics.random import Key


def noise_images(name: str, shape: tuple[int, ...], train: int, test: int) -> DataSet:
    """So many images of this shape for training and for testing, with labels of ten classes that say nothing."""
    parts = (_part(Key(0).fold(part), count, shape) for part, count in (("train", train), ("test", test)))
    return DataSet(name, "classification", *parts, tuple("0123456789"))


def _part(key: Key, count: int, shape: tuple[int, ...]) -> LabelledData:
    return LabelledData(key.uniform((count, *shape), torch.float32), torch.arange(count) % 10)
