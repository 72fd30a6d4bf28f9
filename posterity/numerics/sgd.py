"""Gradient ascent with momentum on one flat vector."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from posterity.errors import fraction, positive
from posterity.numerics.optimizer import Optimizer, Proximal


class SGDState(NamedTuple):
    """The velocity, shaped as theta."""

    velocity: Tensor


@dataclass(frozen=True)
class SGD(Optimizer):
    """Gradient ascent with heavy-ball or Nesterov momentum, as in `torch.optim.SGD`.

    **Math**: v <- momentum v + g; theta <- theta + step_size v (or step_size (g + momentum v) with `nesterov`).
    A proximal step takes the subgradient p of the penalty at which it ends, and v <- momentum v + g - p.

    **Limit**: converges linearly to a strongly convex mode with a constant step size below 2 (1 + momentum) / L.

    **Cost**: two passes over theta.

    **References**: Polyak (1964); Sutskever et al. (2013); Ochs et al. (2014), iPiano, Algorithm 1.

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

    def ascend_proximal(
        self,
        theta: Tensor,
        grad: Tensor,
        state: SGDState,
        step_size: float | Tensor,
        divisor: float,
        proximal: Proximal,
    ) -> SGDState:
        """One step of the smooth part and a proximal one, whose subgradient the velocity takes up."""
        state = self.ascend(theta, grad, state, step_size, divisor)
        step = step_size * (1.0 + self.momentum) if self.nesterov else step_size  # p is in g and in v
        reached = proximal(theta, step)
        least = torch.finfo(theta.dtype).tiny  # a step of size 0 moves nothing, and has no subgradient
        taken = (theta - reached) / (step.clamp_min(least) if isinstance(step, Tensor) else max(step, least))
        state.velocity.sub_(taken)
        theta.copy_(reached)
        return state
