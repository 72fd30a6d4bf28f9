"""The functions of a likelihood that posterity does not have, for tests of `Custom`: hyperbolic noise.

log p(y | f) = -sqrt(1 + (y - f)^2) - log(2 K_1(1)) for each entry, K the modified Bessel function: like a double
exponential, with its kink rounded off.
"""

import math

import torch
from torch import Tensor

from posterity.likelihoods import Custom
from posterity.numerics.random import Key

BESSEL = 0.6019072301972346  # K_1(1)
VARIANCE = 2.699483935593772  # K_2(1) / K_1(1)


def log_density(outputs: Tensor, targets: Tensor) -> Tensor:
    return (-torch.sqrt(1.0 + (targets - outputs).square()) - math.log(2.0 * BESSEL)).sum(-1)


def sampler(outputs: Tensor, key: Key) -> Tensor:
    """By the distribution function on a grid with cells of 0.01."""
    grid = torch.linspace(-40.0, 40.0, 8001, dtype=torch.float64, device=outputs.device)
    cumulative = torch.exp(-torch.sqrt(1.0 + grid.square())).cumsum(0)
    uniform = key.uniform(tuple(outputs.shape), torch.float64, outputs.device)
    return outputs + grid[torch.searchsorted(cumulative / cumulative[-1], uniform)].to(outputs)


def mean(outputs: Tensor) -> Tensor:
    return outputs


def variance(outputs: Tensor) -> Tensor:
    return torch.full_like(outputs, VARIANCE)


def hyperbolic(fisher_draws: int) -> Custom:
    """The likelihood with all its functions."""
    return Custom(log_density, sampler, mean, variance, fisher_draws=fisher_draws)
