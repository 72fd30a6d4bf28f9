"""All masks of a tiny network: the exact values that draws of masks estimate."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from posterity.datasets.toys import sine
from posterity.evidence import dropout_divergence, dropout_divergence_far
from posterity.inference import infer
from posterity.likelihoods import Gaussian
from posterity.methods import MCDropout
from posterity.model import Joint
from posterity.networks import MLP
from posterity.numerics.random import Key
from posterity.optim.optimizer import Adam
from posterity.optim.schedules import Cosine
from posterity.posteriors import Dropout, MaskMixture, enumerated
from posterity.predictive import DrawsPredictive, moment_matched
from posterity.priors import Normal

WIDTHS = (0.1, 0.05, 0.01, 0.001)  # s l, the width of the two components in units of the prior's scale
RATES = (0.5, 0.1)
FARTHEST = 14.0  # in units of s
POINTS = 281


@dataclass(frozen=True)
class Failure:
    """The `distance` |m| / s below which the exact divergence falls with |m| although the divergence of training rises.

    `within_a_percent` is the distance beyond which its slope is right to one per cent.
    """

    width: float
    rate: float
    distance: float
    within_a_percent: float


@dataclass(frozen=True, eq=False)
class Divergence:
    """Divergences of a row of one weight over |m| / s = `distance`, by width for the first of the rates; failures."""

    distance: Tensor
    exact: dict[float, Tensor]
    far: dict[float, Tensor]
    failures: list[Failure]


def divergence() -> Divergence:
    """Compute both divergences, and where their slopes differ; nothing is random."""
    distance = torch.linspace(0.0, FARTHEST, POINTS, dtype=torch.float64)
    exact, far = {}, {}
    for width in WIDTHS:
        mean = (distance * width).unsqueeze(1)
        exact[width] = dropout_divergence(mean, width, RATES[0], 1.0)
        far[width] = dropout_divergence_far(mean, width, RATES[0], 1.0)
    failures = [
        Failure(width=width, rate=rate, distance=_first(0.0, width, rate), within_a_percent=_first(0.99, width, rate))
        for rate in RATES
        for width in WIDTHS
    ]
    return Divergence(distance, exact, far, failures)


def _first(least: float, width: float, rate: float) -> float:
    """Find by bisection the least distance beyond which the ratio of slopes, exact over training, exceeds `least`."""
    low, high = 2.0, 30.0
    for _ in range(20):
        middle = 0.5 * (low + high)
        low, high = (low, middle) if _ratio(middle, width, rate) > least else (middle, high)
    return 0.5 * (low + high)


def _ratio(distance: float, width: float, rate: float) -> float:
    """Return the slope in |m| of the exact divergence, divided by the slope of training's divergence."""
    slopes = []
    for function in (dropout_divergence, dropout_divergence_far):
        mean = torch.tensor([distance * width], dtype=torch.float64, requires_grad=True)
        slopes.append(float(torch.autograd.grad(function(mean, width, rate, 1.0), mean)[0]))
    return slopes[0] / slopes[1]


UNITS, RATE, NOISE = 5, 0.3, 0.3
AT = -4.0  # the input at which densities are compared
SIZES = (2, 4, 8, 16, 32, 64, 128, 256, 512)
REPEATS = 1000
STEPS = 1500


@dataclass(frozen=True)
class Estimate:
    """Errors of estimates by `draws` masks at one input, over many sets of masks; variances are of f, without noise."""

    draws: int
    mean_error: float  # root mean square error
    mean_error_by_theory: float
    plug_in_variance: float  # its mean
    unbiased_variance: float
    standard_error: float  # of the mean of the unbiased variances


@dataclass(frozen=True, eq=False)
class Enumeration:
    """The exact mixture at `AT` with its moments, and the estimates of these; log densities at targets `y` (K,)."""

    masks: int
    mean: float
    variance: float
    estimates: list[Estimate]
    y: Tensor
    log_density: Tensor
    moment_matched_log_density: Tensor

    @property
    def divergence(self) -> float:
        """KL of the exact predictive from the Gaussian with its moments, in nats."""
        density = self.log_density.exp()
        return float(torch.trapezoid(density * (self.log_density - self.moment_matched_log_density), self.y))


def enumeration(seed: int) -> Enumeration:
    """Train a network of five hidden units with dropout, and sum over its 32 masks."""
    data = sine(seed=seed)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(Key(seed).fold("tiny").seed)
        net = MLP((1, UNITS, 1), activation="tanh", dropout=RATE).double()
    x, y = (part.double() for part in data.train.pair)
    joint = Joint(net, Gaussian(NOISE), Normal(2.0), len(data.train))
    q, _ = infer(MCDropout(STEPS, None, Adam(0.02), Cosine()), joint, (x, y), seed=seed)
    assert isinstance(q, Dropout)
    return _compared(q, torch.tensor([[AT]], dtype=torch.float64), seed)


def _compared(q: Dropout, at: Tensor, seed: int) -> Enumeration:
    exact = enumerated(q, at)
    mean, variance = float(exact.mean), float(exact.covariance)
    spread = math.sqrt(variance + NOISE**2)
    y = torch.linspace(mean - 6 * spread, mean + 6 * spread, 1201, dtype=torch.float64)
    wide = MaskMixture(exact.likelihood, exact.outputs.expand(-1, len(y), -1), exact.weights)  # the input at every y
    return Enumeration(
        masks=len(exact.weights),
        mean=mean,
        variance=variance,
        estimates=[_estimate(q, at, exact, draws, seed) for draws in SIZES],
        y=y,
        log_density=wide.log_prob(y.unsqueeze(1)),
        moment_matched_log_density=wide.moment_matched().log_prob(y.unsqueeze(1)),
    )


def _estimate(q: Dropout, at: Tensor, exact: MaskMixture, draws: int, seed: int) -> Estimate:
    outputs = q.outputs(at, draws * REPEATS, Key(seed).fold("masks").fold(draws))
    sets = DrawsPredictive(Gaussian(NOISE), outputs.view(draws, REPEATS, 1))  # every set of masks as a row
    fitted, plain = moment_matched(sets), moment_matched(sets, unbiased=False)
    return Estimate(
        draws=draws,
        mean_error=float((fitted.mean - exact.mean).square().mean().sqrt()),
        mean_error_by_theory=math.sqrt(float(exact.covariance) / draws),
        plug_in_variance=float(plain.epistemic.mean()),
        unbiased_variance=float(fitted.epistemic.mean()),
        standard_error=float(fitted.epistemic.std() / math.sqrt(REPEATS)),
    )
