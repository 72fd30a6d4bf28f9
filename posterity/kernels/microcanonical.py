"""Microcanonical dynamics: velocities of unit length turn towards the gradient, and are refreshed in part."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from posterity.kernels.state import Place, Target

EDGE = 0.1931833275037836  # share of the outer kicks of the minimal-norm integrator (McLachlan, 1995)
MEMORY, WIDTH, MOST = 0.98, 9.0, 1e6  # of the search for the step size: of averages, of trust in logs, largest ratio


def unit(vectors: Tensor) -> Tensor:
    """Divide vectors (C, P) by their lengths."""
    return vectors / _length(vectors)


def _length(vectors: Tensor) -> Tensor:
    length: Tensor = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
    return length.clamp_min(torch.finfo(vectors.dtype).tiny)


def kicked(velocity: Tensor, grad: Tensor, time: Tensor | float) -> tuple[Tensor, Tensor]:
    """Turn unit velocities (C, P) towards the gradient for a time; returns them and log |Jacobian| (C,).

    **Math**: the flow of du/dt = (I - u u^T) g / (P - 1) at a fixed gradient g, of direction e. With d = time |g| /
    (P - 1), u' = (u + e (sinh d + (u.e) (cosh d - 1))) / c, c = cosh d + (u.e) sinh d, and the area of the sphere is
    changed by c^-(P - 1). Both fractions are written in exp(-d), which does not overflow.

    **References**: Steeg and Galstyan (2021), Hamiltonian dynamics with non-Newtonian momentum for rapid sampling;
    Robnik and Seljak (2024), Fluctuation without dissipation: microcanonical Langevin Monte Carlo.
    """
    others, strength = grad.shape[-1] - 1, _length(grad)
    along = (velocity * grad).sum(-1, keepdim=True) / strength
    fall = time / -others * strength
    fallen = torch.exp(fall)
    less = 1.0 - fallen
    towards = torch.addcmul(1.0 + fallen, along, less) * less / strength
    turned = torch.addcmul(2.0 * fallen * velocity, towards, grad)
    growth = 0.5 * torch.addcmul(1.0 + along, 1.0 - along, fallen.square())
    log_growth = growth.clamp_min(torch.finfo(grad.dtype).tiny).log()
    return unit(turned), others * (fall - log_growth).squeeze(-1)


def isokinetic(
    target: Target, place: Place, velocity: Tensor, step_size: Tensor | float, steps: int = 1
) -> tuple[Place, Tensor, Tensor]:
    """Integrate isokinetic dynamics by minimal-norm steps; returns the new place, velocity and log |Jacobian| (C,).

    **Math**: dx/dt = u, |u| = 1, with the kicks of `kicked`: kick lambda e, move e/2, kick (1 - 2 lambda) e, move e/2,
    kick lambda e; e is `step_size`, a number or (C, 1). log pi(end) - log pi(start) + log |Jacobian|, minus the error
    of the energy, is 0 for exact dynamics, which leave the target and a uniform direction of u as they are.

    **Limit**: reversible; the energy is kept to O(e^2). Needs P > 1.

    **Cost**: two gradients per step.

    **References**: as `kicked`; Omelyan, Mryglod and Folk (2003) (the integrator).
    """
    position, value, grad = place
    half = 0.5 * step_size
    velocity, log_volume = kicked(velocity, grad, EDGE * step_size)
    for left in reversed(range(steps)):
        for share in (1.0 - 2.0 * EDGE, 2.0 * EDGE if left else EDGE):
            position = position + half * velocity
            value, grad = target(position)
            velocity, change = kicked(velocity, grad, share * step_size)
            log_volume = log_volume + change
    return Place(position, value, grad), velocity, log_volume


def refreshed(velocity: Tensor, noise: Tensor, step_size: Tensor | float, length: Tensor | float) -> Tensor:
    """Refresh unit velocities in part, so that they are forgotten over the distance `length`; noise (C, P) is normal.

    **Math**: u' = (u + s noise) / |u + s noise|, s^2 = (exp(2 e / length) - 1) / P for a step of size e.
    """
    share = torch.sqrt(torch.expm1(torch.as_tensor(2.0 * step_size / length)) / velocity.shape[-1])
    return unit(velocity + share * noise)


def microcanonical(
    target: Target, place: Place, velocity: Tensor, noise: Tensor, step_size: Tensor | float, length: Tensor | float
) -> tuple[Place, Tensor, Tensor]:
    """Unadjusted microcanonical Langevin steps, one for each of `noise` (n, C, P): a refresh, then an isokinetic step.

    Returns the end, the velocity and the sum over steps of the squared errors of the energy (C,).

    **Limit**: biased by the error of the integrator; the variance of the energy error per parameter tells by how much.

    **Cost**: two gradients per step.

    **References**: Robnik and Seljak (2024), Fluctuation without dissipation: microcanonical Langevin Monte Carlo.
    """
    squares = torch.zeros_like(place.value)
    for each in noise.unbind(0):
        velocity = refreshed(velocity, each, step_size, length)
        end, velocity, log_volume = isokinetic(target, place, velocity, step_size)
        squares = squares + (end.value - place.value + log_volume).square()
        place = end
    return place, velocity, squares


class EnergySearch(NamedTuple):
    """Search for step sizes (C,): logs of the sums of weighted ratios, divided by step sizes^6, and of weights."""

    log_total: Tensor
    log_weight: Tensor

    @property
    def step_size(self) -> Tensor:
        """The step sizes (C,) to take next."""
        return ((self.log_weight - self.log_total) / 6.0).exp()


def no_energies(like: Tensor) -> EnergySearch:
    """Begin the search for step sizes `like` (C,)."""
    return EnergySearch(*(torch.full_like(like, -math.inf) for _ in EnergySearch._fields))


def with_energies(search: EnergySearch, ratio: Tensor, step_size: Tensor) -> EnergySearch:
    """Update the search after steps whose energy variance was `ratio` (C,) times the wanted.

    **Math**: the variance grows as the sixth power of the step size e, so that the next is the mean of ratio / e^6 to
    the power -1/6. Later steps count more, and ratios near 1, which tell most, as exp(-(log ratio)^2 / (2 9^2)).

    **References**: Robnik, De Luca, Silverstein and Seljak (2023), Microcanonical Hamiltonian Monte Carlo, section 4.
    """
    log_ratio = ratio.nan_to_num(MOST, MOST).clamp(1.0 / MOST, MOST).log()
    trust = -0.5 * (log_ratio / WIDTH).square()
    log_weight = torch.logaddexp(search.log_weight + math.log(MEMORY), trust)
    log_total = torch.logaddexp(search.log_total + math.log(MEMORY), trust + log_ratio - 6.0 * step_size.log())
    return EnergySearch(log_total, log_weight)
