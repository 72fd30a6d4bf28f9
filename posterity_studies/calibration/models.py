"""The three models of the study, small and tame, in float64."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import nn

from posterity.likelihoods import Bernoulli, Gaussian
from posterity.model import Joint
from posterity.networks import MLP
from posterity.numerics.random import Key
from posterity.priors import Normal
from posterity_studies.calibration.problem import Problem

ROWS = 10


def linear() -> Problem:
    """y = a + b x with noise whose log has a N(-0.5, 0.5^2) prior, on 10 rows of two inputs; weights N(0, 1)."""
    likelihood = Gaussian(scale=0.6, learn=True, log_scale_prior=(-0.5, 0.5))
    return Problem(Joint(nn.Linear(2, 1).double(), likelihood, Normal(1.0), ROWS), _inputs())


def logistic() -> Problem:
    """Labels with log odds a + b x, on 10 rows of two inputs; weights N(0, 1)."""
    return Problem(Joint(nn.Linear(2, 1).double(), Bernoulli(), Normal(1.0), ROWS), _inputs())


def network() -> Problem:
    """A network with 3 tanh units and noise of scale 0.7, on 10 rows of one input; weights N(0, 1), 4 probes."""
    joint = Joint(MLP((1, 3, 1), "tanh").double(), Gaussian(scale=0.7), Normal(1.0), ROWS)
    inputs = torch.linspace(-2.0, 2.0, ROWS, dtype=torch.float64).unsqueeze(1)
    return Problem(joint, inputs, torch.tensor([[-3.0], [-1.0], [0.0], [2.0]], dtype=torch.float64))


def _inputs() -> torch.Tensor:
    return Key(0).fold("inputs").normal((ROWS, 2), torch.float64)


MODELS: Mapping[str, Callable[[], Problem]] = MappingProxyType(
    {"linear": linear, "logistic": logistic, "network": network}
)
