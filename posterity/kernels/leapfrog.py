"""The leapfrog integrator."""

from torch import Tensor

from posterity.kernels.place import Place, Target


def leapfrog(
    target: Target, place: Place, momentum: Tensor, step_size: Tensor | float, steps: int = 1
) -> tuple[Place, Tensor]:
    """The place and the momentum (C, P) after so many leapfrog steps of unit mass.

    **Math**: p <- p + (e/2) grad; then L times x <- x + e p and p <- p + e grad, the last kick halved; e is
    `step_size`, a number or (C, 1), negative to go back in time.

    **Limit**: reversible and volume preserving; the energy is kept to O(e^2), if e is below 2 over the largest
    frequency.

    **Cost**: one gradient a step.

    **References**: Neal (2011), MCMC using Hamiltonian dynamics, eq. 5.18-5.20.

    **Example**: a harmonic oscillator comes back after a period.

    >>> import torch
    >>> from posterity.kernels.place import place_at
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
    """Log density of position and momentum (C,), without the constant of the momentum's: minus the energy."""
    return value - 0.5 * momentum.square().sum(-1)
