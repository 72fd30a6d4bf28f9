"""What the study compares: an approximation at fixed prior and noise, and variational EM by the same approximation."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from posterity.evidence import MacKayUpdate, NoiseScale, PerTensor, PriorScale
from posterity.inference import Method
from posterity.likelihoods import Gaussian
from posterity.methods import MAP, Laplace, MeanField, VariationalEM
from posterity.model import Joint
from posterity.optim.optimizer import Adam
from posterity.optim.schedules import Cosine
from posterity.posteriors import Posterior
from posterity.predictive import Predictive
from posterity.priors import FanIn, Normal
from posterity_studies.hyperparameters.settings import Settings
from posterity_studies.uci.protocol import Split, mlp

SIDE = 7
PRIOR_SCALES = tuple(10 ** (-1.5 + step / 3) for step in range(SIDE))
"""From 0.03 to 3, one scale for all weights."""
NOISE_SCALES = tuple(0.02 * 2**step for step in range(SIDE))
"""Standard deviations of the standardised target, from 0.02 to 1.28."""
FIRST_NOISE = 0.3
ROUNDS = 40
BURN_IN = 0.02
DRAWS = 500


@dataclass(frozen=True)
class Recipe:
    """An approximation: its label, its stages at fixed values, and variational EM whose E-steps are by the same ones.

    Further what it predicts.
    """

    label: str
    stages: Callable[[Settings], tuple[Method, ...]]
    em: Callable[[Settings], VariationalEM]
    predict: Callable[[Posterior, Tensor], Predictive]


def grid_problem(split: Split, settings: Settings) -> Joint:
    """The network of the protocol with a member for each cell of the grid, prior scale by prior scale."""
    prior = torch.tensor(PRIOR_SCALES, dtype=torch.float64).repeat_interleave(SIDE)
    noise = torch.tensor(NOISE_SCALES, dtype=torch.float64).repeat(SIDE)
    return Joint(mlp(split, settings), Gaussian(noise.reshape(-1, 1, 1)), Normal(prior), len(split.train))


def em_problem(split: Split, settings: Settings) -> Joint:
    """The same network at the prior and noise that EM begins with."""
    return Joint(mlp(split, settings), Gaussian(FIRST_NOISE), Normal(settings.prior_scale), len(split.train))


def _map(settings: Settings) -> MAP:
    return MAP(settings.steps, settings.batch_size, Adam(settings.step_size), Cosine())


def _laplace_em(settings: Settings) -> VariationalEM:
    """A mode that moves on between the rounds, and one of MacKay's steps in each."""
    return VariationalEM(
        Laplace(tuning=None),
        (MacKayUpdate(PerTensor()),),
        rounds=ROUNDS,
        burn_in=BURN_IN,
        tolerance=None,
        fit=_map(settings),
    )


def _mean_field(settings: Settings) -> MeanField:
    """Steps a third as long as those of MAP, as draws add noise; scales begin small, or weights collapse."""
    step_size = Adam(settings.step_size / 3)
    return MeanField(settings.steps, settings.batch_size, step_size, Cosine(), initial_scales=FanIn(gain=0.02))


def _mean_field_em(settings: Settings) -> VariationalEM:
    """The M-steps in closed form."""
    return VariationalEM(_mean_field(settings), (PriorScale(PerTensor()), NoiseScale()), rounds=ROUNDS, burn_in=BURN_IN)


RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        "laplace": Recipe(
            "Laplace",
            lambda settings: (_map(settings), Laplace(tuning=None)),
            _laplace_em,
            lambda posterior, inputs: posterior.predict(inputs),
        ),
        "mean-field": Recipe(
            "Mean field",
            lambda settings: (_mean_field(settings),),
            _mean_field_em,
            lambda posterior, inputs: posterior.predict(inputs, draws=DRAWS),
        ),
    }
)
"""Full Gauss-Newton and the linearised predictive are what `Laplace` does by default.

Batch and step size are those of `study uci`. The groups of weights, the M-steps, when they come and where prior and
noise begin were chosen by the log evidence of training rows: a first prior that is too wide leads to poorer modes.
Mean field has the same rounds, and on some data ends with too much noise: what its bound lacks counts as residuals.
"""
