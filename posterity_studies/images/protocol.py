"""The protocol: which images, networks, prior and methods, and the scores."""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from posterity.datasets import LabelledData, mnist
from posterity.errors import positive, positive_whole, unknown
from posterity.inference import Method
from posterity.likelihoods import Categorical
from posterity.methods import MAP, MeanField
from posterity.methods.parts.gradients import WeightSampling
from posterity.metrics import accuracy, expected_calibration_error, negative_log_likelihood
from posterity.model import Joint, Tempering
from posterity.networks import MLP, LeNet
from posterity.numerics.random import Key
from posterity.optim.optimizer import Adam
from posterity.optim.schedules import Cosine
from posterity.posteriors import Posterior
from posterity.predictive.predictive import Predictive
from posterity.priors import Normal

DATA_SETS = ("mnist", "fashion-mnist")
PIXELS = 28 * 28


@dataclass(frozen=True)
class Architecture:
    """A network of the study: label, how it is made, steps of mean-field inference, whether it takes rows of pixels."""

    label: str
    make: Callable[[], nn.Module]
    steps: int
    flat: bool = False


NETWORKS: Mapping[str, Architecture] = MappingProxyType(
    {
        "mlp": Architecture("one hidden layer of 400", lambda: MLP((PIXELS, 400, 10)), 10_000, flat=True),
        "lenet": Architecture("LeNet", LeNet, 5000),
    }
)


@dataclass(frozen=True)
class Settings:
    """What the numbers of the study depend on beside network, eta and seed.

    Mean-field inference takes `steps` steps (None: those of the network) from a MAP of a tenth as many, which all etas
    of a seed share; MAP takes as many as both together. `etas` is the grid from which eta is chosen, by the NLL of
    the first seed on `held_out` training images. The prior has the variance 1/5 that is usual for this experiment.

    Numbers of steps, step sizes (out of 0.001 to 0.01 for both), the estimator (out of mirrored weights and local
    reparameterisation) and the grid were chosen by scores of the first seed on the held-out images, after some hundred
    such fits. No test score was looked at for any choice.
    """

    data_set: str = "mnist"
    etas: tuple[float, ...] = (1.0, 0.5, 0.3, 0.2, 0.1)
    held_out: int = 5000
    seeds: int = 3
    steps: int | None = None
    batch_size: int = 128
    step_size: float = 0.003
    prior_scale: float = math.sqrt(0.2)
    draws: int = 64
    seed: int = 0
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.data_set not in DATA_SETS:
            raise ValueError(unknown("data set", self.data_set, DATA_SETS))
        for name in ("held_out", "seeds", "batch_size", "draws"):
            positive_whole(f"Settings.{name}", getattr(self, name))
        positive_whole("Settings.steps", 1 if self.steps is None else self.steps)
        for name in ("step_size", "prior_scale"):
            positive(f"Settings.{name}", getattr(self, name))
        if not self.etas:
            raise ValueError("Settings.etas must have at least one number. Got none.")
        for eta in self.etas:
            positive("Settings.etas", eta)

    def config(self) -> dict[str, Any]:
        """The settings as JSON."""
        return {**asdict(self), "etas": list(self.etas)}

    def common(self) -> dict[str, Any]:
        """Those of them on which the numbers of a single fit depend."""
        return {name: value for name, value in self.config().items() if name not in ("etas", "seeds")}

    def stages(self, network: str, eta: float | None) -> tuple[Method, ...]:
        """MAP for an eta of None; else a short MAP, and mean-field inference that goes on from there."""
        steps, adam = self.steps or NETWORKS[network].steps, Adam(self.step_size)
        first = max(1, steps // 10)
        if eta is None:
            return (MAP(first + steps, self.batch_size, adam, Cosine()),)
        mirrored = WeightSampling(antithetic=True)
        return (
            MAP(first, self.batch_size, adam, Cosine()),
            MeanField(steps, self.batch_size, adam, Cosine(), mirrored),
        )


@dataclass(frozen=True, eq=False)
class Images:
    """Training, held-out and test images, (N, 1, 28, 28), or (N, 784) for a network that takes pixels."""

    train: LabelledData
    held_out: LabelledData
    test: LabelledData

    def flat(self) -> "Images":
        """The same with each image as a row of pixels."""
        parts = (LabelledData(part.inputs.flatten(1), part.targets) for part in (self.train, self.held_out, self.test))
        return Images(*parts)

    def to(self, device: str) -> "Images":
        """The same on a device."""
        pairs = ((part.inputs.to(device), part.targets.to(device)) for part in (self.train, self.held_out, self.test))
        return Images(*(LabelledData(*pair) for pair in pairs))


def read_images(settings: Settings) -> Images:
    """The images of the study; which of the training images are held out follows from the seed."""
    whole = mnist(name=settings.data_set)
    rest, held_out = whole.validation_split(settings.held_out / len(whole.train), settings.seed)
    return Images(rest.train, held_out, rest.test).to(settings.device)


def problem(network: str, eta: float | None, seed: int, num_data: int, settings: Settings) -> Joint:
    """The joint of a fit: its first weights follow from the seed, and the KL of its bound weighs eta (None: 1)."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(Key(settings.seed).fold(network).fold(seed).seed)
        module = NETWORKS[network].make()
    tempering = Tempering.tempered(1.0 if eta is None else eta)
    return Joint(module.to(settings.device), Categorical(), Normal(settings.prior_scale), num_data, tempering)


def scores(posterior: Posterior, data: Images, settings: Settings) -> dict[str, float]:
    """Error in per cent, NLL in nats, ECE and mean confidence on the held-out and the test images."""
    found = {}
    for name, part in (("held_out", data.held_out), ("test", data.test)):
        predictive = posterior.predict(part.inputs, draws=settings.draws)
        found.update({f"{name}_{key}": value for key, value in _scores(predictive, part).items()})
    return found


def _scores(predictive: Predictive, part: LabelledData) -> dict[str, float]:
    return {
        "error": 100.0 * (1.0 - accuracy(predictive, part.targets)),
        "nll": negative_log_likelihood(predictive, part.targets),
        "ece": expected_calibration_error(predictive, part.targets),
        "confidence": float(predictive.probs.max(-1).values.double().mean()),
    }
