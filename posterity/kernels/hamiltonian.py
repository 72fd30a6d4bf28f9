"""Hamiltonian Monte Carlo with trajectories of a fixed number of steps."""

from torch import Tensor

from posterity.kernels.leapfrog import leapfrog, log_joint
from posterity.kernels.metropolis import accepted, single_move
from posterity.kernels.place import Move, Place, Target


def hamiltonian(
    target: Target, place: Place, momentum: Tensor, log_uniform: Tensor, step_size: Tensor | float, steps: int
) -> tuple[Place, Move]:
    """A transition of Hamiltonian Monte Carlo: `steps` leapfrogs from a momentum (C, P), then the Metropolis rule.

    **Math**: H(x, p) = -log pi(x) + |p|^2 / 2; the end is taken with probability min(1, exp(H(start) - H(end))).

    **Limit**: exact for every step size, a number or (C, 1), and number of steps. A trajectory of a whole period comes
    back to where it began: draw the step size anew for each transition.

    **Cost**: `steps` gradients.

    **References**: Neal (2011), MCMC using Hamiltonian dynamics, section 5.3.2.
    """
    end, last = leapfrog(target, place, momentum, step_size, steps)
    return judged(place, momentum, end, last, log_uniform, steps)


def judged(
    place: Place, momentum: Tensor, end: Place, last: Tensor, log_uniform: Tensor, steps: int
) -> tuple[Place, Move]:
    """The end of a trajectory of so many steps, or its start, by the Metropolis rule; with the momenta at both."""
    before = log_joint(place.value, momentum)
    log_ratio = log_joint(end.value, last) - before
    after, accept = accepted(end, place, log_ratio, log_uniform)
    return after, single_move(accept, -before, log_ratio, steps)
