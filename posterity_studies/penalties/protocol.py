"""The networks and penalties by name, and the images."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from torch import nn
from torch.nn import functional as F

from posterity.datasets import LabelledData, cifar10, mnist
from posterity.networks import VGG, ConvNet
from posterity.penalties import L1, GroupLasso, Penalty, SquaredL2
from posterity_studies.penalties.settings import Settings
from posterity_studies.rows import moments, split_rows

PENALTIES: Mapping[str, Penalty] = MappingProxyType(
    {
        "l2": SquaredL2(),
        "l1": L1(),
        "rows": GroupLasso("rows"),
        "columns": GroupLasso("columns"),
        "channels": GroupLasso("channels"),
    }
)


@dataclass(frozen=True)
class Architecture:
    """A network of the study: `make` takes classes, channels, width and whether it has batch norm.

    `side` is the least of its images.
    """

    label: str
    make: Callable[[int, int, int, bool], nn.Module]
    width: int
    epochs: int
    side: int


ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        "cvnn": Architecture(
            "small convolutional network",
            lambda classes, channels, width, norm: ConvNet(classes, channels, width, norm),
            width=32,
            epochs=20,
            side=28,
        ),
        "vgg19": Architecture(
            "VGG-19",
            lambda classes, channels, width, norm: VGG(19, classes, channels, norm, width),
            width=64,
            epochs=60,
            side=32,
        ),
    }
)
SMALL = Architecture(
    "small convolutional network", ARCHITECTURES["cvnn"].make, width=8, epochs=5, side=28
)  # grey images


@dataclass(frozen=True, eq=False)
class Rows:
    """Training, held-out and test images on the device, (N, C, H, W)."""

    train: LabelledData
    held_out: LabelledData
    test: LabelledData
    classes: int


def read(settings: Settings) -> Rows:
    """The images; BadData where the data set is absent, ValueError where it has fewer than are asked for."""
    whole = cifar10() if settings.data == "cifar-10" else mnist(name=settings.data)
    count = round(len(whole.train) / 10) if settings.held_out is None else settings.held_out
    train, held = split_rows(whole, rows=settings.rows, held_out=count, seed=settings.seed)
    assert held is not None
    assert whole.classes is not None
    mean, scale = moments(train.inputs, "Use other data.")
    around = max(0, settings.architecture.side - train.inputs.shape[-1]) // 2

    def part(one: LabelledData) -> LabelledData:
        images = F.pad(one.inputs, (around,) * 4) if around else one.inputs
        return LabelledData(((images - mean) / scale).to(settings.device), one.targets.to(settings.device))

    return Rows(part(train), part(held), part(whole.test), len(whole.classes))
