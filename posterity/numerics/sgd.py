"""Gradient ascent with momentum on one flat vector."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from posterity.errors import fraction, positive
from posterity.numerics.optimizer import Optimizer


class SGDState(NamedTuple):
    """The velocity, shaped as theta."""

    velocity: Tensor


@dataclass(frozen=True)
class SGD(Optimizer):
    """Gradient ascent with heavy-ball or Nesterov momentum, as in `torch.optim.SGD`.

    **Math**: v <- momentum v + g; theta <- theta + step_size v (or step_size (g + momentum v) with `nesterov`).

    **Limit**: converges linearly to a strongly convex mode with a constant step size below 2 (1 + momentum) / L.

    **Cost**: two passes over theta.

    **References**: Polyak (1964); Sutskever et al. (2013).

    **Example**:

    >>> theta = torch.zeros(1)
    >>> state = SGD(step_size=0.5).ascend(theta, torch.ones(1), SGD().init(theta), 0.5, 1.0)
    >>> theta
    tensor([0.5000])
    """

    step_size: float = 0.1
    momentum: float = 0.9
    nesterov: bool = False

    def __post_init__(self) -> None:
        positive("SGD.step_size", self.step_size)
        fraction("SGD.momentum", self.momentum)

    def init(self, theta: Tensor) -> SGDState:
        """Zero velocity."""
        return SGDState(torch.zeros_like(theta))

    def ascend(
        self, theta: Tensor, grad: Tensor, state: SGDState, step_size: float | Tensor, divisor: float
    ) -> SGDState:
        """One step in place."""
        velocity = state.velocity.mul_(self.momentum).add_(grad, alpha=1.0 / divisor)
        way = velocity * self.momentum + grad / divisor if self.nesterov else velocity
        if isinstance(step_size, Tensor):
            theta.addcmul_(way, step_size)
        else:
            theta.add_(way, alpha=step_size)
        return state
