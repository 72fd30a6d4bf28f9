"""The protocol: settings, networks, penalties, and the method."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

from torch import nn
from torch.nn import functional as F

from posterity.datasets import LabelledData, cifar10, mnist
from posterity.errors import positive, positive_whole, unknown
from posterity.methods import MAP
from posterity.model.augmentation import Augmentation, Compose, Crop, Flip
from posterity.networks import VGG, ConvNet
from posterity.optim.optimizer import SGD
from posterity.optim.schedules import Cosine
from posterity.penalties import L1, GroupLasso, Penalty, SquaredL2
from posterity_studies.grids import log_grid, merged
from posterity_studies.rows import moments, split_rows

DATA_SETS = ("mnist", "fashion-mnist", "cifar-10")
SETUPS = ("usual", "bayesian")
PRECISIONS = ("float32", "bf16")
PENALTIES: Mapping[str, Penalty] = MappingProxyType(
    {
        "l2": SquaredL2(),
        "l1": L1(),
        "rows": GroupLasso("rows"),
        "columns": GroupLasso("columns"),
        "channels": GroupLasso("channels"),
    }
)
DECK = ("l2", "l1", "rows", "columns")  # those of the published table
RATIOS = log_grid(10.0**-3, 10.0**0.5, 8)
SWEPT = ("penalties", "setups", "ratios", "lambdas", "seeds")  # what the numbers of a single fit do not depend on


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


NETWORKS: Mapping[str, Architecture] = MappingProxyType(
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
SMALL = Architecture("small convolutional network", NETWORKS["cvnn"].make, width=8, epochs=5, side=28)  # grey images


@dataclass(frozen=True, eq=False)
class Rows:
    """Training, held-out and test images on the device, (N, C, H, W)."""

    train: LabelledData
    held_out: LabelledData
    test: LabelledData
    classes: int


@dataclass(frozen=True)
class Settings:
    """What is asked for; None, and an empty tuple, stand for what is usual with the network and the data set.

    A fit minimises the mean of -log p over n training rows plus lambda sum over l of lambda_l r(w_l), l the
    convolutions and linear layers; other tensors have the prior N(0, 10^2). Setup "bayesian": lambda_l with which a
    weight of P_l incoming ones has the variance 1 / P_l under the penalty's prior, lambda = ratio / n for each of
    `ratios`, to which 1 (lambda_Th) belongs. Setup "usual": lambda_l = 1, or the root of the size of a group, and the
    `lambdas`; without any, for each ratio the half power of ten nearest to the lambda at which the first weights (of
    the first seed) have the penalty that they have in the other setup.

    Fits take proximal steps with Nesterov's momentum, in step sizes that rise over a tenth of the run and fall on a
    cosine. A seed has its own first weights, order of the rows and changes of the images, which all its lambdas and
    both setups share. First weights are torch's, or without `batch_norm` normal of variance 2 / fan-in, by which
    signals do not fade from layer to layer. Images are scaled to mean 0 and variance 1 by channel. With `precision`
    "bf16" convolutions and products of training are computed in that type; weights and predictions are of float32.
    """

    data: str = "mnist"
    net: str = "cvnn"
    penalties: tuple[str, ...] = DECK
    setups: tuple[str, ...] = SETUPS
    ratios: tuple[float, ...] = ()
    lambdas: tuple[float, ...] = ()
    seeds: int = 2
    epochs: int | None = None
    rows: int | None = None
    width: int | None = None
    batch_size: int = 128
    step_size: float | None = None
    batch_norm: bool = True
    augment: bool | None = None
    held_out: int | None = None
    precision: str = "float32"
    seed: int = 0
    device: str = "cpu"

    def __post_init__(self) -> None:
        for kind, names, known in (
            ("data set", (self.data,), DATA_SETS),
            ("network", (self.net,), NETWORKS),
            ("penalty", self.penalties, PENALTIES),
            ("setup", self.setups, SETUPS),
            ("precision", (self.precision,), PRECISIONS),
        ):
            if not names:
                raise ValueError(f"Settings: there must be at least one {kind}. Got none.")
            for name in names:
                if name not in known:
                    raise ValueError(unknown(kind, name, known))
        for name in ("epochs", "rows", "width", "held_out"):
            positive_whole(f"Settings.{name}", 1 if getattr(self, name) is None else getattr(self, name))
        for name in ("seeds", "batch_size"):
            positive_whole(f"Settings.{name}", getattr(self, name))
        positive("Settings.step_size", 1.0 if self.step_size is None else self.step_size)
        for name in ("ratios", "lambdas"):
            for value in getattr(self, name):
                positive(f"Settings.{name}", value)
        if self.lambdas and "usual" not in self.setups:
            raise ValueError("Settings.lambdas are those of the setup 'usual', which is not asked for. Use ratios.")

    @property
    def architecture(self) -> Architecture:
        """The network, with what is usual for these images."""
        return SMALL if self.net == "cvnn" and self.data != "cifar-10" else NETWORKS[self.net]

    @property
    def all_ratios(self) -> tuple[float, ...]:
        """lambda / lambda_Th of the Bayesian setup, ascending, 1 among them."""
        return merged((1.0, *(self.ratios or RATIOS)))

    @property
    def actual_width(self) -> int:
        """The width of the network."""
        return self.width or self.architecture.width

    @property
    def actual_epochs(self) -> int:
        """Passes over the rows."""
        return self.epochs or self.architecture.epochs

    @property
    def actual_step_size(self) -> float:
        """The largest step size; without batch norm a long one leads astray."""
        return self.step_size or (0.1 if self.batch_norm else 0.02)

    @property
    def augmentation(self) -> Augmentation | None:
        """What changes training images: crop and flip for CIFAR-10 unless told otherwise, crop alone for others."""
        wanted = self.data == "cifar-10" if self.augment is None else self.augment
        if not wanted:
            return None
        return Compose((Crop(4), Flip())) if self.data == "cifar-10" else Crop(2)

    def config(self) -> dict[str, Any]:
        """The settings as JSON."""
        lists = {name: list(value) for name, value in asdict(self).items() if isinstance(value, tuple)}
        return {**asdict(self), **lists}

    def common(self) -> dict[str, Any]:
        """Those on which the numbers of a single fit depend."""
        kept = {name: value for name, value in self.config().items() if name not in SWEPT}
        return kept | {
            "epochs": self.actual_epochs,
            "width": self.actual_width,
            "augment": repr(self.augmentation),
            "step_size": self.actual_step_size,
        }

    def read(self) -> Rows:
        """The images; BadData where the data set is absent, ValueError where it has fewer than are asked for."""
        whole = cifar10() if self.data == "cifar-10" else mnist(name=self.data)
        count = round(len(whole.train) / 10) if self.held_out is None else self.held_out
        train, held = split_rows(whole, rows=self.rows, held_out=count, seed=self.seed)
        assert held is not None
        assert whole.classes is not None
        mean, scale = moments(train.inputs, "Use other data.")
        around = max(0, self.architecture.side - train.inputs.shape[-1]) // 2

        def part(one: LabelledData) -> LabelledData:
            images = F.pad(one.inputs, (around,) * 4) if around else one.inputs
            return LabelledData(((images - mean) / scale).to(self.device), one.targets.to(self.device))

        return Rows(part(train), part(held), part(whole.test), len(whole.classes))

    def inference(self, penalty: str, num_data: int) -> MAP:
        """The method of every fit with a penalty on so many rows."""
        batch = min(self.batch_size, num_data)
        steps = self.actual_epochs * (num_data // batch)
        sgd = SGD(self.actual_step_size, 0.9, nesterov=True)
        return MAP(steps, batch, sgd, Cosine(0.1), proximal=PENALTIES[penalty].prior().nonsmooth)
