"""The protocol: which images, networks, prior and methods, and the scores."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import nn

from posterity.datasets import LabelledData, mnist
from posterity.likelihoods import Categorical
from posterity.metrics import accuracy, expected_calibration_error, negative_log_likelihood
from posterity.model import Joint, Tempering
from posterity.networks import MLP, LeNet
from posterity.numerics.random import Key
from posterity.posteriors import Posterior
from posterity.predictive.predictive import Predictive
from posterity.priors import Normal
from posterity_studies.images.settings import Settings

PIXELS = 28 * 28


@dataclass(frozen=True)
class Architecture:
    """A network of the study: label, how it is made, whether it takes rows of pixels."""

    label: str
    make: Callable[[], nn.Module]
    flat: bool = False


NETWORKS: Mapping[str, Architecture] = MappingProxyType(
    {
        "mlp": Architecture("one hidden layer of 400", lambda: MLP((PIXELS, 400, 10)), flat=True),
        "lenet": Architecture("LeNet", LeNet),
    }
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
