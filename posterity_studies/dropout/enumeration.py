"""All masks of a tiny network: what draws of them must come to."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from posterity.datasets.toys import sine
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

UNITS, RATE, NOISE = 5, 0.3, 0.3
AT = -4.0  # the input at which densities are compared
SIZES = (2, 4, 8, 16, 32, 64, 128, 256, 512)
REPEATS = 1000
STEPS = 1500


@dataclass(frozen=True)
class Estimate:
    """How estimates by `draws` masks do at one input, over many sets of masks; variances are of f, noise left out."""

    draws: int
    mean_error: float  # root mean square
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
