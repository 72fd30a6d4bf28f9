"""The Metropolis rule of acceptance, and random-walk Metropolis."""

import math

import torch
from torch import Tensor

from posterity.kernels.state import Move, Place, Target, chosen

DIVERGENCE = 1000.0  # a larger fall of the log density means that the integrator has lost the trajectory


def finite_ratio(log_ratio: Tensor) -> Tensor:
    """Log ratio of acceptance, with NaN replaced by minus infinity: such a proposal is never accepted."""
    return torch.where(torch.isnan(log_ratio), -math.inf, log_ratio)


def accepted(proposal: Place, place: Place, log_ratio: Tensor, log_uniform: Tensor) -> tuple[Place, Tensor]:
    """Accept each chain's proposal with probability min(1, exp(log_ratio)); returns the places and these (C,).

    >>> here, there = (Place(torch.full((2, 1), x), torch.zeros(2), torch.zeros(2, 1)) for x in (0.0, 1.0))
    >>> place, probability = accepted(there, here, torch.tensor([0.5, -2.0]), torch.tensor([-0.1, -0.1]))
    >>> place.position.flatten().tolist(), [round(p, 4) for p in probability.tolist()]
    ([1.0, 0.0], [1.0, 0.1353])
    """
    log_ratio = finite_ratio(log_ratio)
    return chosen(log_uniform < log_ratio, proposal, place), log_ratio.clamp(max=0.0).exp()


def random_walk(
    target: Target, place: Place, noise: Tensor, log_uniform: Tensor, step_size: Tensor | float
) -> tuple[Place, Move]:
    """Random-walk Metropolis transition: x' = x + s noise (C, P), taken with probability min(1, pi(x') / pi(x)).

    **Limit**: exact for every step size s; the best is near 2.4 sd / sqrt(P), with a quarter accepted.

    **Cost**: one value of the density (its gradient comes with it, unused).

    **References**: Roberts, Gelman and Gilks (1997), Weak convergence and optimal scaling of random walk Metropolis.
    """
    position = place.position + step_size * noise
    proposal = Place(position, *target(position))
    log_ratio = proposal.value - place.value
    after, accept = accepted(proposal, place, log_ratio, log_uniform)
    return after, single_move(accept, -place.value, log_ratio)


def single_move(accept: Tensor, energy: Tensor, log_ratio: Tensor, leapfrogs: int = 1) -> Move:
    """Record a transition with a single proposal."""
    count = torch.full_like(accept, leapfrogs)
    return Move(accept, energy, finite_ratio(log_ratio) < -DIVERGENCE, count, torch.zeros_like(accept))
