"""Networks, penalties and images by name; layer factors of both setups, lambdas, and the joint of some fits."""

import glob
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import sqrt
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from posterity.datasets import LabelledData, cifar10, mnist
from posterity.likelihoods import Categorical
from posterity.model import Joint
from posterity.model.network import Network
from posterity.networks import VGG, ConvNet
from posterity.numerics.random import Key
from posterity.penalties import L1, GroupLasso, Penalty, SquaredL2, lambda_theory, layer_factors, usual_factors
from posterity.penalties.training import WIDE, penalised
from posterity.priors import FanIn, He, Layerwise, Prior
from posterity.priors.fan import ScaleRule
from posterity_studies.grids import half_power, merged
from posterity_studies.penalties.settings import Settings
from posterity_studies.rows import first_weights, moments, split_rows

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
    """Read the images; raise BadData without the data set, ValueError if it has fewer images than the settings."""
    data = cifar10() if settings.data == "cifar-10" else mnist(name=settings.data)
    count = round(len(data.train) / 10) if settings.held_out is None else settings.held_out
    train, held = split_rows(data, rows=settings.rows, held_out=count, seed=settings.seed)
    assert held is not None
    assert data.classes is not None
    mean, scale = moments(train.inputs, "Use other data.")
    around = max(0, settings.architecture.side - train.inputs.shape[-1]) // 2

    def part(labelled_data: LabelledData) -> LabelledData:
        images = F.pad(labelled_data.inputs, (around,) * 4) if around else labelled_data.inputs
        return LabelledData(((images - mean) / scale).to(settings.device), labelled_data.targets.to(settings.device))

    return Rows(part(train), part(held), part(data.test), len(data.classes))


@dataclass(frozen=True)
class Cell:
    """One fit: a penalty, a setup, lambda / lambda_Th, the largest step size, passes over the rows, and a seed."""

    penalty: str
    setup: str
    ratio: float
    step_size: float
    epochs: int
    seed: int

    def path(self, folder: Path) -> Path:
        """Return its file in the folder of the study."""
        names = f"ratio-{self.ratio:.12g}", f"step-size-{self.step_size:g}", f"epochs-{self.epochs}"
        return folder.joinpath("runs", self.penalty, self.setup, *names, f"seed-{self.seed}.json")

    def __str__(self) -> str:
        return f"{self.penalty}, {self.setup}, lambda = {self.ratio:.3g} lambda_Th, {self.steps}, seed {self.seed}"

    @property
    def steps(self) -> str:
        """Describe the step size and length of the run."""
        return f"step size {self.step_size:g}, {self.epochs} epoch{'s' * (self.epochs > 1)}"


@dataclass(frozen=True, eq=False)
class Problem:
    """A penalty: the network, lambda_l by setup and name, and the relative weight `exchange` of the Bayesian ones.

    `exchange` is sum of lambda_l r(w_l) at the first weights of the first seed under the Bayesian lambda_l, over the
    same under the usual ones.
    """

    penalty: str
    module: nn.Module
    factors: Mapping[str, Mapping[str, float]]
    exchange: float
    rows: Rows

    @property
    def num_data(self) -> int:
        """Number n of training rows."""
        return len(self.rows.train)

    def ratios(self, setup: str, settings: Settings) -> tuple[float, ...]:
        """lambda / lambda_Th of the fits of a setup, ascending."""
        if setup == "bayesian":
            return settings.all_ratios
        theory = lambda_theory(self.num_data)
        matched = (half_power(ratio * theory * self.exchange) for ratio in settings.all_ratios)
        return merged([strength / theory for strength in settings.lambdas or matched])

    def relative(self, cell: Cell) -> float:
        """Return the penalty of the first weights, divided by its value in the Bayesian setup at lambda_Th."""
        return cell.ratio if cell.setup == "bayesian" else cell.ratio / self.exchange

    def joint(self, cells: Sequence[Cell]) -> Joint:
        """Return the joint of one fit, or one with a member for each of several fits."""
        rules: dict[str, Prior | ScaleRule] = {}
        for name in self.factors["bayesian"]:
            rates = [cell.ratio * self.factors[cell.setup][name] for cell in cells]
            rate = rates[0] if len(rates) == 1 else torch.tensor(rates, dtype=torch.float64, device="cpu")
            rules[glob.escape(name)] = PENALTIES[self.penalty].prior(rate)
        return Joint(self.module, Categorical(), Layerwise({**rules, "*": WIDE}), self.num_data)

    def start(self, seeds: Sequence[int], settings: Settings) -> Tensor:
        """Return first weights, (P,) or (seeds, P)."""
        network = self.joint([Cell(self.penalty, "bayesian", 1.0, 0.1, 1, 0)]).network
        key = Key(settings.seed).fold("penalties").fold("start")
        fresh = network.fresh if settings.batch_norm else partial(_he, self.module, network)
        return first_weights(fresh, seeds, key)


def problem(penalty: str, rows: Rows, settings: Settings) -> Problem:
    """Return the problem of a penalty."""
    kind = PENALTIES[penalty]
    with torch.random.fork_rng(devices=[]):  # unused weights: every fit draws its own
        torch.default_generator.manual_seed(0)
        channels = rows.train.inputs.shape[1]
        module = settings.architecture.make(rows.classes, channels, settings.actual_width, settings.batch_norm)
    module = module.to(settings.device)
    factors = {"usual": usual_factors(module, kind), "bayesian": layer_factors(module, kind, FanIn())}
    bare = Problem(penalty, module, factors, 1.0, rows)
    layout = Joint(module, Categorical(), WIDE, len(rows.train)).network.layout
    weights = {
        part.name: view for part, view in zip(layout, layout.views(bare.start([0], settings).double()), strict=True)
    }
    total = {
        setup: sum(factor * float(kind(weights[name])) for name, factor in own.items())
        for setup, own in factors.items()
    }
    return Problem(penalty, module, factors, total["bayesian"] / total["usual"], rows)


def _he(module: nn.Module, network: Network, key: Key) -> Tensor:
    """Draw weights (P,) of variance 2 / fan-in and zero biases, on the CPU: the same on every device."""
    weights = penalised(module)
    pieces = []
    for part in network.layout:
        if part.name in weights:
            scale = sqrt(He().variance(weights[part.name].fan_in, weights[part.name].fan_out))
            pieces.append(scale * key.fold(part.name).normal((part.size,), torch.float32, "cpu"))
        else:
            pieces.append(torch.zeros(part.size, device="cpu"))
    return torch.cat(pieces).to(network.initial)
