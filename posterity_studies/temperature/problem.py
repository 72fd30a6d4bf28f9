"""The networks of the study by name, the problem of each width, and the scores of a fit."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from posterity import metrics
from posterity.diagnostics import collapse
from posterity.likelihoods import Categorical
from posterity.model import Joint, Tempering
from posterity.model.network import Network
from posterity.model.units import neurons, parameters
from posterity.networks import MLP, LeNet, MeanFieldNetwork, ResNet
from posterity.numerics.random import Key
from posterity.posteriors import Gaussian, Posterior
from posterity.posteriors.samples import Samples
from posterity.priors import Normal
from posterity.priors.fan import FanIn, ScaleRule
from posterity_studies.rows import first_weights
from posterity_studies.temperature.data import DTYPES, Rows
from posterity_studies.temperature.settings import Settings


@dataclass(frozen=True)
class SameScale(ScaleRule):
    """Variance gain^2 for every tensor: neurons that begin alike, whatever the width.

    >>> SameScale(0.5).variance(fan_in=100, fan_out=10)
    0.25
    """

    def variance(self, fan_in: int, fan_out: int) -> float:
        return self.gain**2


@dataclass(frozen=True)
class Architecture:
    """A network of the study.

    `make` takes the shape of a row, the number of classes and the width. `units` says what N of tau p/N counts.
    `widths` are the usual ones; empty where they must be given, and (None,) where the network has no width. `etas` and
    `taus` are the temperatures where the user names none.
    """

    label: str
    make: Callable[[tuple[int, ...], int, int | None], nn.Module]
    units: str
    flat: bool
    epochs: int
    batch_size: int
    step_size: float
    widths: tuple[int | None, ...] = ()
    etas: tuple[float, float, int] | None = None
    taus: tuple[float, float, int] | None = None
    initial_scales: ScaleRule = field(default_factory=lambda: FanIn(gain=0.1))

    def count(self, network: Network) -> int:
        """N: the neurons of the network, or its parameters."""
        return neurons(network) if self.units == "neurons" else parameters(network)


ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        "one-hidden": Architecture(
            "one hidden layer, averaged over its neurons",
            lambda shape, classes, width: MeanFieldNetwork(shape[0], _wide(width), classes),
            "neurons",
            flat=True,
            epochs=30,
            batch_size=500,
            step_size=0.03,  # by the bound on 2,000 and 10,000 training digits; it does not depend on the width
            taus=(1e-6, 1.0, 13),
            initial_scales=SameScale(gain=0.05),
        ),
        "mlp": Architecture(
            "one hidden layer with biases",
            lambda shape, classes, width: MLP((shape[0], _wide(width), classes)),
            "parameters",
            flat=True,
            epochs=30,
            batch_size=500,
            step_size=0.003,
            etas=(1e-5, 10.0, 13),
        ),
        "lenet": Architecture(
            "LeNet",
            lambda shape, classes, _: LeNet(classes, shape[0], shape[-1]),
            "parameters",
            flat=False,
            epochs=30,
            batch_size=250,
            step_size=0.003,
            widths=(None,),
            etas=(1e-5, 10.0, 13),
        ),
        "resnet-20": Architecture(
            "ResNet-20",
            lambda shape, classes, width: ResNet(20, classes, shape[0], _wide(width)),
            "parameters",
            flat=False,
            epochs=50,
            batch_size=250,
            step_size=0.003,
            widths=(16,),
            etas=(1e-5, 10.0, 13),
        ),
    }
)


def _wide(width: int | None) -> int:
    assert width is not None  # the settings have refused it
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
        """p."""
        return len(self.rows.train)

    def tau(self, eta: float) -> float:
        """The tau of eta = tau p/N."""
        return eta * self.units / self.num_data

    def tempered(self, etas: Sequence[float]) -> Joint:
        """The joint with one eta, or with a member for each."""
        joint = self.joint
        eta = etas[0] if len(etas) == 1 else torch.tensor(etas, dtype=torch.float64, device=joint.device)
        return Joint(joint.network, joint.likelihood, joint.prior, joint.num_data, Tempering.tempered(eta))

    def start(self, seeds: Sequence[int], key: Key) -> Tensor:
        """First weights, (P,) for one seed or a row for each."""
        return first_weights(self.joint.fresh, seeds, key)


def problem(width: int | None, rows: Rows, settings: Settings) -> Problem:
    """The problem of a width."""
    architecture = settings.architecture
    with torch.random.fork_rng(devices=[]):  # weights that nobody sees: every fit has fresh ones
        torch.default_generator.manual_seed(0)
        module = architecture.make(rows.shape, rows.classes, width)
    module = module.to(settings.device, DTYPES[settings.dtype])
    prior = Normal(math.sqrt(settings.prior_variance))
    joint = Joint(module, Categorical(), prior, len(rows.train))
    return Problem(width, joint, architecture.count(joint.network), rows)


ROWS = 2048  # of a chunk of predictions


def scores(posterior: Posterior, seed: int, problem: Problem, settings: Settings) -> dict[str, float]:
    """How the averaged prediction does on test, held-out and foreign rows, and how far weights are from the prior.

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
    found = {
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
        found["held_out_nll"] = metrics.negative_log_likelihood(held_out, rows.held_out.targets)
        found["held_out_accuracy"] = metrics.accuracy(held_out, rows.held_out.targets)
    if isinstance(posterior, Gaussian):
        found["kl"] = float(collapse(posterior).kl_per_weight.sum())
        found["kl_per_unit"] = found["kl"] / problem.units
        found["mean_sigma"] = float(posterior.variance.sqrt().mean())
    elif isinstance(posterior, Samples):
        found["mean_sigma"] = float(posterior.theta.double().std(1, correction=0).mean())
    return found
