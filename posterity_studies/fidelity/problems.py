"""The small problems by name: rows, network, prior and noise, all of them given, so that the posterior is one."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from posterity.datasets import DataSet, LabelledData, uci_classification, uci_regression
from posterity.datasets.toys import sine, two_moons
from posterity.likelihoods import Bernoulli, Gaussian
from posterity.model import Joint
from posterity.networks import MLP
from posterity.numerics.random import Key
from posterity.priors import Normal

HIDDEN = 10
PRIOR_SCALE = 1.0
RATE = 0.1  # of dropout, where a method drops
ROWS, TEST = 100, 60  # the most rows of a table that train and that are predicted


@dataclass(frozen=True)
class Recipe:
    """How a problem is made: its label, its data set, and the noise in units of the target (None: classes)."""

    label: str
    read: Callable[[int], DataSet]
    noise: float | None = None


PROBLEMS: Mapping[str, Recipe] = MappingProxyType(
    {
        "moons": Recipe("two moons", lambda seed: two_moons(100, 0.2, seed, test=200)),
        "sine": Recipe("sin(x) + x", lambda seed: sine(50, 0.3, seed, test=TEST), noise=0.3),
        "breast-cancer": Recipe("breast cancer", lambda seed: uci_classification("wdbc", seed=seed)),
        "energy": Recipe("energy", lambda seed: uci_regression("energy", 0), noise=0.4),
        "boston": Recipe("boston", lambda seed: uci_regression("bostonHousing", 0), noise=0.4),
    }
)


@dataclass(frozen=True, eq=False)
class Problem:
    """A problem: the joint of a network with one hidden layer, its rows, and test inputs; all float32 and scaled."""

    name: str
    joint: Joint
    train: LabelledData
    test: Tensor

    @property
    def label(self) -> str:
        """Its name in tables and figures."""
        return PROBLEMS[self.name].label

    @property
    def noise(self) -> float | None:
        """The standard deviation of the noise, None for classes."""
        return PROBLEMS[self.name].noise

    def dropping(self) -> Joint:
        """The joint of the same network with a layer of dropout."""
        own = self.joint
        return Joint(_network(self.train.inputs.shape[1], RATE, self.name), own.likelihood, own.prior, own.num_data)


def problem(name: str, seed: int) -> Problem:
    """The problem of this name; the seed draws the rows of synthetic ones, and the first weights."""
    recipe = PROBLEMS[name]
    data = recipe.read(seed)
    inputs, test = _scaled(data.train.inputs, data.train.inputs), _scaled(data.test.inputs, data.train.inputs)
    targets = data.train.targets.reshape(len(inputs), 1)
    order = Key(seed).fold(name).permutation(len(inputs))[:ROWS] if len(inputs) > ROWS else torch.arange(len(inputs))
    likelihood = Bernoulli() if recipe.noise is None else Gaussian(scale=recipe.noise)
    rows = LabelledData(inputs[order], _targets(targets, recipe.noise)[order])
    spread = torch.linspace(0, len(test) - 1, min(TEST, len(test))).round().long()
    joint = Joint(_network(inputs.shape[1], 0.0, name), likelihood, Normal(PRIOR_SCALE), len(rows))
    return Problem(name, joint, rows, test[spread])


def _network(inputs: int, rate: float, name: str) -> MLP:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(Key(0).fold(name).seed)
        return MLP((inputs, HIDDEN, 1), activation="tanh", dropout=rate)


def _scaled(inputs: Tensor, train: Tensor) -> Tensor:
    constant = train.amax(0) == train.amin(0)
    scale = torch.where(constant, torch.ones_like(train[0]), train.std(0))
    return ((inputs - train.mean(0)) / scale).float()


def _targets(targets: Tensor, noise: float | None) -> Tensor:
    return targets.float() if noise is None else ((targets - targets.mean()) / targets.std()).float()
