"""Leapfrog integration, and Hamiltonian transitions."""

from torch import Tensor

from posterity.kernels.metropolis import accepted, single_move
from posterity.kernels.state import Move, Place, Target


def leapfrog(
    target: Target, place: Place, momentum: Tensor, step_size: Tensor | float, steps: int = 1
) -> tuple[Place, Tensor]:
    """Integrate Hamiltonian dynamics of unit mass by `steps` leapfrogs; returns the new place and momentum (C, P).

    **Math**: p <- p + (e/2) grad; then L times x <- x + e p and p <- p + e grad, the last kick halved; e is
    `step_size`, a number or (C, 1), negative to go back in time.

    **Limit**: reversible and volume preserving; the energy is kept to O(e^2), if e is below 2 over the largest
    frequency.

    **Cost**: one gradient per step.

    **References**: Neal (2011), MCMC using Hamiltonian dynamics, eq. 5.18-5.20.

    **Example**: a harmonic oscillator comes back after a period.

    >>> import torch
    >>> from posterity.kernels.state import place_at
    >>> target = lambda x: (-0.5 * x.square().sum(-1), -x)
    >>> begin = place_at(target, torch.ones(1, 1, dtype=torch.float64))
    >>> end, momentum = leapfrog(target, begin, torch.zeros(1, 1, dtype=torch.float64), 2 * torch.pi / 1000, 1000)
    >>> bool((end.position - 1).abs() < 1e-4), bool(momentum.abs() < 1e-4)
    (True, True)
    """
    position, value, grad = place
    momentum = momentum + 0.5 * step_size * grad
    for left in reversed(range(steps)):
        position = position + step_size * momentum
        value, grad = target(position)
        momentum = momentum + (step_size if left else 0.5 * step_size) * grad
    return Place(position, value, grad), momentum


def log_joint(value: Tensor, momentum: Tensor) -> Tensor:
    """Unnormalised log density of position and momentum (C,): minus the energy."""
    return value - 0.5 * momentum.square().sum(-1)


def hamiltonian(
    target: Target, place: Place, momentum: Tensor, log_uniform: Tensor, step_size: Tensor | float, steps: int
) -> tuple[Place, Move]:
    """Hamiltonian Monte Carlo transition: `steps` leapfrogs from a momentum (C, P), then the Metropolis rule.

    **Math**: H(x, p) = -log pi(x) + |p|^2 / 2; the end is taken with probability min(1, exp(H(start) - H(end))).

    **Limit**: exact for every step size, a number or (C, 1), and number of steps. A trajectory of a whole period
    returns to its start: draw a new step size for each transition.

    **Cost**: `steps` gradients.

    **References**: Neal (2011), MCMC using Hamiltonian dynamics, section 5.3.2.
    """
    end, last = leapfrog(target, place, momentum, step_size, steps)
    return judged(place, momentum, end, last, log_uniform, steps)


def judged(
    place: Place, momentum: Tensor, end: Place, last: Tensor, log_uniform: Tensor, steps: int
) -> tuple[Place, Move]:
    """Choose the end or the start of a trajectory, from its first and last momentum, by the Metropolis rule."""
    before = log_joint(place.value, momentum)
    log_ratio = log_joint(end.value, last) - before
    after, accept = accepted(end, place, log_ratio, log_uniform)
    return after, single_move(accept, -before, log_ratio, steps)
