"""The networks of the study, how each is fitted, the fits, and what each method takes of them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from torch import nn

from posterity.inference import Method
from posterity.methods import MAP, SWAG, Ensemble, Laplace, MCDropout, MeanField, NaturalGradient
from posterity.methods.parts.subset import LastLayer
from posterity.model import Affine, Augmentation, Compose, Crop, Flip
from posterity.networks import MLP, LeNet, ResNet
from posterity.optim.optimizer import SGD, Adam, Optimizer
from posterity.optim.schedules import Cosine
from posterity.posteriors import Posterior
from posterity.priors.fan import FanIn
from posterity_studies.shared_fits import Fit, first, whole

DRAWS = 16  # of a prediction, where a posterior has no draws of its own


@dataclass(frozen=True)
class Recipe:
    """A network, from the shape of an image, the number of classes and a dropout rate, and how it is fitted.

    `wander` is the step size of SWAG. `epochs` are passes over the rows of each member of a fit, `longer` the factor on
    them with augmentation. `scale_step` is that of `MeanField`.
    """

    label: str
    make: Callable[[tuple[int, ...], int, float], nn.Module]
    members: int
    batch: int
    optimizer: Optimizer
    schedule: Cosine
    prior_scale: float
    wander: float
    epochs: Mapping[str, int]
    longer: float = 1.6
    scale_step: float = 1.0


def _dropped(network: nn.Sequential, rate: float) -> nn.Module:
    """The network with dropout before every linear layer but one that takes the image."""
    layers: list[nn.Module] = []
    for index, layer in enumerate(network):
        if rate and isinstance(layer, nn.Linear) and index > 1:
            layers.append(nn.Dropout(rate))
        layers.append(layer)
    return nn.Sequential(*layers)


def _mlp(shape: tuple[int, ...], classes: int, rate: float) -> nn.Module:
    channels, height, width = shape
    return _dropped(nn.Sequential(nn.Flatten(), *MLP((channels * height * width, 400, classes))), rate)


def _lenet(shape: tuple[int, ...], classes: int, rate: float) -> nn.Module:
    network = LeNet(classes, shape[0], shape[-1])
    return _dropped(network, rate) if rate else network


def _resnet(shape: tuple[int, ...], classes: int, rate: float) -> nn.Module:
    network = ResNet(20, classes, shape[0])
    return nn.Sequential(network[:-1], nn.Dropout(rate), network[-1]) if rate else network


SMALL = {"map": 10, "swag": 2, "mean-field": 10, "natural-gradient": 15, "dropout": 10}
RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        "lenet": Recipe("LeNet", _lenet, 5, 128, Adam(0.003), Cosine(0.05), 0.2, 0.02, SMALL),
        "mlp": Recipe("one hidden layer of 400", _mlp, 5, 128, Adam(0.003), Cosine(0.05), 0.45, 0.02, SMALL),
        "resnet-20": Recipe(
            "ResNet-20",
            _resnet,
            8,
            128,
            SGD(0.1, momentum=0.9),
            Cosine(0.02),
            0.21,  # of 45,000 images: the usual weight decay of 0.0005 on the mean loss
            0.02,
            {"map": 100, "swag": 20, "mean-field": 60, "natural-gradient": 100, "dropout": 100},
            longer=2.0,
            scale_step=10.0,
        ),
    }
)
"""The networks by word."""
RATE = 0.2  # of dropout


@dataclass(frozen=True)
class Length:
    """How a network is fitted to so many rows, with a factor on all numbers of epochs."""

    recipe: Recipe
    rows: int
    factor: float

    @property
    def batch(self) -> int:
        """Rows in a step."""
        return min(self.recipe.batch, self.rows)

    def of(self, fit: str) -> int:
        """Steps of a fit."""
        return max(4, round(self.recipe.epochs[fit] * self.factor * self.rows / self.batch))


def _mode(length: Length, rate: float) -> Method:
    own = length.recipe
    return Ensemble(MAP(length.of("map"), length.batch, own.optimizer, own.schedule), own.members)


def _swag(length: Length, rate: float) -> Method:
    steps = length.of("swag")
    every = max(1, steps // 40)
    fit = MAP(steps, length.batch, SGD(length.recipe.wander))
    return Ensemble(SWAG(fit, every=every, rank=min(20, steps // every)), length.recipe.members)


def _mean_field(length: Length, rate: float) -> Method:
    steps, wide = length.of("mean-field"), length.recipe.scale_step
    return MeanField(steps, length.batch, Adam(0.002), Cosine(0.05), initial_scales=FanIn(0.1), scale_step=wide)


def _natural_gradient(length: Length, rate: float) -> Method:
    return NaturalGradient(length.of("natural-gradient"), length.batch)


def _dropout(length: Length, rate: float) -> Method:
    return MCDropout(length.of("dropout"), length.batch, Adam(0.003), Cosine(0.05))


def fits_of(recipe: Recipe) -> Mapping[str, Fit]:
    """The fits of a network by name."""
    members = recipe.members
    return {
        "map": Fit(_mode, members=members),
        "swag": Fit(_swag, "map", members=members),
        "laplace": Fit(lambda *_: Ensemble(Laplace(subset=LastLayer()), members), "map", members=members),
        "mean-field": Fit(_mean_field, "map", first),
        "natural-gradient": Fit(_natural_gradient, "map", first),
        "dropout": Fit(_dropout, dropping=True),
    }


@dataclass(frozen=True)
class Row:
    """A row of the table: its label, its fit, the part of that posterior which it takes, and draws of predictions."""

    label: str
    fit: str
    part: Callable[[Posterior], Posterior] = whole
    draws: int = DRAWS


ROWS: Mapping[str, Row] = MappingProxyType(
    {
        "map": Row("MAP", "map", first),
        "ensemble": Row("Ensemble", "map"),
        "laplace": Row("Laplace, last layer", "laplace", first),
        "laplace-ensemble": Row("Laplace, last layers of an ensemble", "laplace"),
        "swag": Row("SWAG", "swag", first),
        "multi-swag": Row("multi-SWAG", "swag"),
        "dropout": Row("MC dropout", "dropout"),
        "mean-field": Row("MeanField", "mean-field"),
        "natural-gradient": Row("NaturalGradient", "natural-gradient"),
    }
)
"""The rows by word."""


def augmentation(data: str) -> Augmentation:
    """The random changes of training images."""
    return Compose((Crop(4), Flip())) if data == "cifar-10" else Compose((Affine(), Crop(2)))
