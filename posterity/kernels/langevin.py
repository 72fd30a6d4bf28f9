"""Langevin dynamics: unadjusted, and with the Metropolis rule."""

import torch
from torch import Tensor

from posterity.kernels.metropolis import accepted, single_move
from posterity.kernels.state import Move, Place, Target


def proposal_mean(place: Place, step_size: Tensor | float) -> Tensor:
    """Mean x + s grad log pi(x) of the next position."""
    return place.position + step_size * place.grad


def unadjusted(target: Target, place: Place, noise: Tensor, step_size: Tensor | float) -> tuple[Place, Move]:
    """Unadjusted Langevin step: x' = x + s grad log pi(x) + sqrt(2 s) noise, always taken.

    **Math**: s is `step_size`, a number or (C, 1); noise (C, P) is standard normal.

    **Limit**: biased by O(s). On a normal target of precision h the variance is 1 / (h (1 - s h / 2)), and the chain
    diverges for s >= 2 / h.

    **Cost**: one gradient.

    **References**: Roberts and Tweedie (1996), Exponential convergence of Langevin distributions, section 1.4.
    """
    position = proposal_mean(place, step_size) + _root(step_size, noise) * noise
    after = Place(position, *target(position))
    always, never = torch.ones_like(place.value), torch.zeros_like(place.value)
    return after, Move(always, -place.value, never.bool(), always, never)


def adjusted(
    target: Target, place: Place, noise: Tensor, log_uniform: Tensor, step_size: Tensor | float
) -> tuple[Place, Move]:
    """MALA transition: the step of `unadjusted` as a Metropolis-Hastings proposal.

    **Math**: log ratio = log pi(x') - log pi(x) + log q(x | x') - log q(x' | x), with log q(b | a) = -|b - a - s
    grad log pi(a)|^2 / (4 s).

    **Limit**: exact for every step size; it is HMC with one leapfrog step of size sqrt(2 s).

    **Cost**: one gradient.

    **References**: Roberts and Rosenthal (1998), Optimal scaling of discrete approximations to Langevin diffusions
    (acceptance near 0.57).
    """
    mean = proposal_mean(place, step_size)
    position = mean + _root(step_size, noise) * noise
    proposal = Place(position, *target(position))
    forth = (position - mean).square().sum(-1)
    back = (place.position - proposal_mean(proposal, step_size)).square().sum(-1)
    quarter = 0.25 / (step_size.squeeze(-1) if isinstance(step_size, Tensor) and step_size.dim() else step_size)
    log_ratio = proposal.value - place.value + quarter * (forth - back)
    after, accept = accepted(proposal, place, log_ratio, log_uniform)
    return after, single_move(accept, -place.value, log_ratio)


def _root(step_size: Tensor | float, like: Tensor) -> Tensor:
    return torch.as_tensor(2.0 * step_size, dtype=like.dtype, device=like.device).sqrt()
