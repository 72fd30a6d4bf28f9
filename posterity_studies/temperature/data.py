"""The rows of the study: training, held out, test, and those from elsewhere."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from posterity.datasets import TOYS, DataSet, LabelledData, cifar10, cifar10_test, load, mnist, mnist_test
from posterity.numerics.random import Key
from posterity_studies.rows import moments, split_rows
from posterity_studies.temperature.settings import Settings

DTYPES = {"float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True, eq=False)
class Rows:
    """Training, held-out (None without any) and test rows, and inputs from elsewhere."""

    train: LabelledData
    held_out: LabelledData | None
    test: LabelledData
    foreign: Tensor
    classes: int

    @property
    def shape(self) -> tuple[int, ...]:
        """That of a row's inputs."""
        return tuple(self.train.inputs.shape[1:])


def read(settings: Settings) -> Rows:
    """The rows of the data set as the network takes them, on the device.

    `held_out` training rows are chosen by the seed, by default a twelfth of them; the first `rows` of the others, in
    the order of the data set, train. Standard pixels are shifted and scaled, by channel, to mean 0 and variance 1 over
    the training rows. Foreign rows are scaled likewise. BadData where a data set is absent, ValueError where it has
    fewer rows than are asked for.
    """
    whole = _data_set(settings.data, settings.seed)
    count = round(len(whole.train) / 12) if settings.held_out is None else settings.held_out
    train, held = split_rows(whole, rows=settings.rows, held_out=count, seed=settings.seed)
    other = _foreign(settings.foreign, train.inputs, len(whole.test), settings.seed)
    standard, flat = settings.pixels == "standard", settings.architecture.flat
    mean, scale = moments(train.inputs, "Use pixels 'raw'.") if standard else (torch.zeros(()), torch.ones(()))

    def prepared(inputs: Tensor) -> Tensor:
        scaled = ((inputs - mean) / scale).to(settings.device, DTYPES[settings.dtype])
        return scaled.flatten(1) if flat else scaled

    def part(labelled: LabelledData) -> LabelledData:
        return LabelledData(prepared(labelled.inputs), labelled.targets.to(settings.device))

    assert whole.classes is not None
    return Rows(part(train), part(held) if held else None, part(whole.test), prepared(other), len(whole.classes))


def describe_foreign(name: str, foreign: str) -> str:
    """What the rows from elsewhere are, in words."""
    if foreign == "uniform":
        return "independent uniform numbers, over twice the range of the training inputs"
    differs = (name == "cifar-10") != (foreign == "cifar-10")
    how = ", padded or cut to the size of the training images, grey and colours made one another" if differs else ""
    return f"test images of {foreign}{how}"


def _data_set(name: str, seed: int) -> DataSet:
    if name in TOYS:
        return load(name, seed)
    return cifar10() if name == "cifar-10" else mnist(name=name)


def _foreign(name: str, like: Tensor, count: int, seed: int) -> Tensor:
    """Inputs from elsewhere in the shape of `like`."""
    if name == "uniform":
        low, high = float(like.min()), float(like.max())
        drawn = Key(seed).fold("foreign").uniform((count, *like.shape[1:]), dtype=torch.float64)
        return (low + (high - low) * (2.0 * drawn - 0.5)).float()
    if like.dim() != 4:
        raise ValueError(f"ood '{name}' has images, and the training rows are none. Use ood 'uniform'.")
    images = (cifar10_test() if name == "cifar-10" else mnist_test(name)).inputs
    missing = like.shape[-1] - images.shape[-1]
    images = F.pad(images, (missing // 2,) * 4) if missing else images  # a negative number cuts
    if images.shape[1] == like.shape[1]:
        return images
    grey = images.mean(1, keepdim=True)
    return grey.expand(-1, like.shape[1], -1, -1).contiguous()
