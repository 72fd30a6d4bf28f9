"""The networks of the study by name, the problem of each width, and the scores of a fit."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from posterity import metrics
from posterity.datasets import TOYS, DataSet, LabelledData, cifar10, cifar10_test, load, mnist, mnist_test
from posterity.diagnostics import collapse
from posterity.likelihoods import Categorical
from posterity.methods.parts.gradients.estimator import initial_log_scales
from posterity.model import Joint, Tempering
from posterity.model.network import Network
from posterity.model.units import neurons, parameters
from posterity.networks import MLP, LeNet, MeanFieldNetwork, ResNet
from posterity.numerics.random import Key
from posterity.posteriors import Gaussian, Posterior
from posterity.posteriors.samples import Samples
from posterity.priors import Normal
from posterity.priors.fan import FanIn, ScaleRule
from posterity.report.files import processor
from posterity_studies.rows import first_weights, moments, split_rows
from posterity_studies.temperature.settings import Settings, Size

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
        """The shape of a row's inputs."""
        return tuple(self.train.inputs.shape[1:])


def read(settings: Settings) -> Rows:
    """Read the rows of the data set in the form of the network's inputs, on the device.

    `held_out` training rows are chosen by the seed, by default a twelfth of them; the first `rows` of the others, in
    the order of the data set, train. Standard pixels are shifted and scaled, by channel, to mean 0 and variance 1 over
    the training rows. Foreign rows are scaled likewise. BadData where a data set is absent, ValueError where it has
    fewer rows than are asked for.
    """
    data = data_set(settings.data, settings.seed)
    count = round(len(data.train) / 12) if settings.held_out is None else settings.held_out
    rows = settings.rows_of(len(data.train) - count)
    train, held = split_rows(data, rows=rows, held_out=count, seed=settings.seed)
    other = foreign_inputs(settings.foreign, train.inputs, len(data.test), settings.seed)
    standard, flat = settings.pixels == "standard", settings.architecture.flat
    mean, scale = moments(train.inputs, "Use pixels 'raw'.") if standard else (torch.zeros(()), torch.ones(()))

    def prepared(inputs: Tensor) -> Tensor:
        scaled = ((inputs - mean) / scale).to(settings.device, DTYPES[settings.dtype])
        return scaled.flatten(1) if flat else scaled

    def part(labelled: LabelledData) -> LabelledData:
        return LabelledData(prepared(labelled.inputs), labelled.targets.to(settings.device))

    assert data.classes is not None
    return Rows(part(train), part(held) if held else None, part(data.test), prepared(other), len(data.classes))


def describe_foreign(name: str, foreign: str) -> str:
    """Describe the foreign rows."""
    if foreign == "uniform":
        return "independent uniform numbers, over twice the range of the training inputs"
    differs = (name == "cifar-10") != (foreign == "cifar-10")
    how = ", padded or cut to the size of the training images, grey and colours made one another" if differs else ""
    return f"test images of {foreign}{how}"


def cell_file(folder: Path, width: int | None, setting: str, seed: int) -> Path:
    """Return the file of a fit, in folders by width and by setting, with a file for each seed."""
    return folder / ("network" if width is None else f"width-{width}") / setting / f"seed-{seed}.json"


def described(study: Any) -> dict[str, Any]:
    """Return the settings and sizes of a study as JSON."""
    settings = study.settings
    return {
        "settings": settings.config(),
        **processor(settings.device),
        "inference": repr(settings.inference(study.num_data)),
        "num_data": study.num_data,
        "held_out": study.held_out,
        "classes": study.classes,
        "foreign_rows": describe_foreign(settings.data, settings.foreign),
        "seeds_differ_in": "first weights, order of training rows, draws of predictions; not the noise of training",
    }


def fits(study: Any) -> dict[str, Any]:
    """Return all fits of a study, diverged ones, and its notes as JSON."""
    return {
        "fits": [{**asdict(result.cell), **result.scores, "seconds": result.seconds} for result in study.results],
        "diverged": [asdict(cell) for cell in study.failed],
        "notes": study.notes(),
    }


def data_set(name: str, seed: int) -> DataSet:
    """The toy problem of a seed, or the images, by name."""
    if name in TOYS:
        return load(name, seed)
    return cifar10() if name == "cifar-10" else mnist(name=name)


def foreign_inputs(name: str, like: Tensor, count: int, seed: int) -> Tensor:
    """Return foreign inputs in the shape of `like`."""
    if name == "uniform":
        low, high = float(like.min()), float(like.max())
        drawn = Key(seed).fold("foreign").uniform((count, *like.shape[1:]), dtype=torch.float64)
        return (low + (high - low) * (2.0 * drawn - 0.5)).float()
    if like.dim() != 4:
        raise ValueError(f"ood '{name}' has images, and the training rows are none. Use ood 'uniform'.")
    images = (cifar10_test() if name == "cifar-10" else mnist_test(name)).inputs
    missing = like.shape[-1] - images.shape[-1]
    images = F.pad(images, (missing // 2,) * 4) if missing else images  # negative padding crops
    if images.shape[1] == like.shape[1]:
        return images
    grey = images.mean(1, keepdim=True)
    return grey.expand(-1, like.shape[1], -1, -1).contiguous()


@dataclass(frozen=True)
class SameScale(ScaleRule):
    """Variance gain^2 for every tensor: the initial neurons do not depend on the width.

    >>> SameScale(0.5).variance(fan_in=100, fan_out=10)
    0.25
    """

    def variance(self, fan_in: int, fan_out: int) -> float:
        return self.gain**2


@dataclass(frozen=True)
class Architecture:
    """A network of the study.

    `make` takes the shape of a row, the number of classes and the width. `units` says what N of tau p/N counts. Widths
    from `wide` on are compared at equal tau.
    """

    label: str
    make: Callable[[tuple[int, ...], int, int | None], nn.Module]
    units: str
    flat: bool
    step_size: float
    quick: Size
    paper: Size
    scale_step: float = 1.0
    wide: int = 0
    initial_scales: ScaleRule = field(default_factory=lambda: FanIn(gain=0.1))

    def count(self, network: Network) -> int:
        """Return N: the neurons of the network, or its parameters."""
        return neurons(network) if self.units == "neurons" else parameters(network)


ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        "one-hidden": Architecture(
            "one hidden layer, averaged over its neurons",
            lambda shape, classes, width: MeanFieldNetwork(shape[0], _wide(width), classes),
            "neurons",
            flat=True,
            step_size=0.03,  # by the bound on 2,000 and 10,000 training digits; it does not depend on the width
            quick=Size((50, 200, 400), 100, 1, taus=(1e-5, 1.0, 11), rows=4000, steps=400, draws=8),
            paper=Size((50, 200, 800, 3200, 6400), 500, 3, taus=(1e-6, 1.0, 13), epochs=12, neuron_draws=100_000),
            wide=200,
            initial_scales=SameScale(gain=0.05),
        ),
        "mlp": Architecture(
            "one hidden layer with biases",
            lambda shape, classes, width: MLP((shape[0], _wide(width), classes)),
            "parameters",
            flat=True,
            step_size=0.003,
            quick=Size((50, 200, 400), 100, 1, etas=(1e-4, 10.0, 6), rows=4000, steps=400, draws=8),
            paper=Size((50, 200, 800), 500, 3, etas=(1e-5, 10.0, 13)),
            wide=200,
        ),
        "lenet": Architecture(
            "LeNet",
            lambda shape, classes, _: LeNet(classes, shape[0], shape[-1]),
            "parameters",
            flat=False,
            step_size=0.003,
            quick=Size((None,), 100, 1, etas=(1e-4, 10.0, 6), rows=4000, steps=400, draws=8),
            paper=Size((None,), 250, 3, etas=(1e-5, 10.0, 13)),
        ),
        "resnet-20": Architecture(
            "ResNet-20",
            lambda shape, classes, width: ResNet(20, classes, shape[0], _wide(width)),
            "parameters",
            flat=False,
            step_size=0.003,
            quick=Size((8, 16), 100, 1, taus=(1e-2, 100.0, 5), rows=4000, steps=400, draws=8),
            paper=Size((8, 16, 32), 250, 3, taus=(1e-2, 100.0, 5)),
            scale_step=10.0,
        ),
    }
)


def _wide(width: int | None) -> int:
    assert width is not None  # refused by the settings
    return width


@dataclass(frozen=True, eq=False)
class Problem:
    """A width: its joint without a temperature, N, and the rows."""

    width: int | None
    joint: Joint
    units: int
    rows: Rows

    @property
    def num_data(self) -> int:
        """Number p of training rows."""
        return len(self.rows.train)

    def tau(self, eta: float) -> float:
        """Return the tau of eta = tau p/N."""
        return eta * self.units / self.num_data

    def tempered(self, temperatures: Sequence[float], *, cold: bool) -> Joint:
        """Return the joint at one eta (or T of a cold posterior), or with a member for each."""
        joint = self.joint
        each = torch.tensor(temperatures, dtype=torch.float64, device=joint.device)
        value = temperatures[0] if len(temperatures) == 1 else each
        tempering = Tempering.cold(value) if cold else Tempering.tempered(value)
        return Joint(joint.network, joint.likelihood, joint.prior, joint.num_data, tempering)

    def start_sigma(self, rule: ScaleRule) -> float:
        """Return the mean standard deviation of a weight before the first step."""
        joint = self.joint
        return float(initial_log_scales(joint, rule, joint.initial()).double().exp().mean())

    def start(self, seeds: Sequence[int], key: Key) -> Tensor:
        """Return first weights, (P,) or (seeds, P)."""
        return first_weights(self.joint.fresh, seeds, key)


def problem(width: int | None, rows: Rows, settings: Settings) -> Problem:
    """Return the problem of a width."""
    architecture = settings.architecture
    with torch.random.fork_rng(devices=[]):  # unused weights: every fit draws its own
        torch.default_generator.manual_seed(0)
        module = architecture.make(rows.shape, rows.classes, width)
    module = module.to(settings.device, DTYPES[settings.dtype])
    prior = Normal(math.sqrt(settings.prior_variance))
    joint = Joint(module, Categorical(), prior, len(rows.train))
    return Problem(width, joint, architecture.count(joint.network), rows)


ROWS = 2048  # of a chunk of predictions
LEARNT = 0.95  # share of log K (NLL of a guess) below which a network has learnt


def scores(posterior: Posterior, seed: int, problem: Problem, settings: Settings) -> dict[str, float]:
    """Return scores of the averaged prediction on test, held-out and foreign rows, and statistics of the weights.

    Accuracy, NLL, Gibbs NLL, ECE (15 bins), class-wise ECE and mean confidence on the test rows, NLL and accuracy on
    those held out, AUROC of the entropy of foreign against test rows; mean standard deviation of a weight, and for a
    Gaussian KL(q || prior) in nats, in all and for each unit. Each `seed` of the study predicts with draws of its own:
    near the prior the labels of a few draws are chance, which a mean over seeds makes less.
    """
    key = Key(settings.seed).fold("predictions").fold(seed)
    rows = problem.rows
    wanted: dict[str, Any] = {"draws": settings.draws_of(problem.units), "batch_size": ROWS, "seed": key.seed}
    test = posterior.predict(rows.test.inputs, **wanted)
    foreign = posterior.predict(rows.foreign, **wanted)
    results = {
        "accuracy": metrics.accuracy(test, rows.test.targets),
        "nll": metrics.negative_log_likelihood(test, rows.test.targets),
        "gibbs_nll": metrics.gibbs_negative_log_likelihood(test, rows.test.targets),
        "ece": metrics.expected_calibration_error(test, rows.test.targets),
        "classwise_ece": metrics.classwise_calibration_error(test, rows.test.targets),
        "confidence": metrics.confidence(test, rows.test.targets),
        "ood_auroc": metrics.out_of_distribution_auroc(test, foreign),
    }
    if rows.held_out is not None:
        held_out = posterior.predict(rows.held_out.inputs, **wanted)
        results["held_out_nll"] = metrics.negative_log_likelihood(held_out, rows.held_out.targets)
        results["held_out_accuracy"] = metrics.accuracy(held_out, rows.held_out.targets)
    if isinstance(posterior, Gaussian):
        results["kl"] = float(collapse(posterior).kl_per_weight.sum())
        results["kl_per_unit"] = results["kl"] / problem.units
        results["mean_sigma"] = float(posterior.variance.sqrt().mean())
    elif isinstance(posterior, Samples):
        results["mean_sigma"] = float(posterior.theta.double().std(1, correction=0).mean())
    return results
