"""Optimisers over flat vectors: Adam and SGD."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from posterity.errors import fraction, positive

StepSize: TypeAlias = float | Tensor
"""A number, or a tensor () on the device of theta whose value is used but never read back."""

Proximal: TypeAlias = Callable[[Tensor, float | Tensor], Tensor]
"""proximal(theta, step): argmin over w of sum of (w - theta)^2 / (2 step) + h(w); step is a number, () or (..., P)."""


class Optimizer(ABC):
    """Gradient ascent on theta. The settings are a value; moments live in the state that `init` makes."""

    step_size: float

    @abstractmethod
    def init(self, theta: Tensor) -> Any:
        """Return the state (a NamedTuple of tensors) before the first step."""

    @abstractmethod
    def ascend(self, theta: Tensor, grad: Tensor, state: Any, step_size: StepSize, divisor: float) -> Any:
        """Move `theta` in place along `grad / divisor` and return the next state.

        The tensors of the state may be reused, and `grad` may be overwritten. theta and grad are contiguous.
        """

    def ascend_proximal(
        self, theta: Tensor, grad: Tensor, state: Any, step_size: StepSize, divisor: float, proximal: Proximal
    ) -> Any:
        """Ascend f - h: `grad / divisor` is the gradient of f, and `proximal` the proximal operator of h.

        The fixed points are the stationary points of f - h, whatever the momentum.
        """
        raise TypeError(
            f"{type(self).__name__} has no proximal steps. Use Adam or SGD, or give it a method ascend_proximal."
        )


class AdamState(NamedTuple):
    """Running first and second moments, shaped as theta, and the number of steps."""

    first: Tensor
    second: Tensor
    steps: Tensor


@dataclass(frozen=True)
class Adam(Optimizer):
    """Adam, as one fused kernel over the flat vector.

    **Math**: m <- b1 m + (1 - b1) g; v <- b2 v + (1 - b2) g^2; theta <- theta + step_size m^ / (sqrt(v^) + epsilon),
    with bias-corrected m^, v^. A proximal step follows it in the same metric, step_size / (sqrt(v^) + epsilon) for each
    weight; m^ and v^ are of the smooth part alone.

    **Limit**: the steps do not shrink by themselves near a mode; use a schedule to converge.

    **Cost**: one pass over theta, the gradient and two moments.

    **References**: Kingma and Ba (2015), Algorithm 1; Yun, Lozano and Yang (2021), Adaptive proximal gradient methods
    for structured neural networks, Algorithm 1.

    **Example**:

    >>> theta = torch.zeros(2)
    >>> state = Adam(step_size=0.1).init(theta)
    >>> state = Adam(step_size=0.1).ascend(theta, torch.tensor([1.0, -2.0]), state, 0.1, 1.0)
    >>> theta
    tensor([ 0.1000, -0.1000])
    """

    step_size: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8

    def __post_init__(self) -> None:
        positive("Adam.step_size", self.step_size)
        positive("Adam.epsilon", self.epsilon)
        fraction("Adam.beta1", self.beta1)
        fraction("Adam.beta2", self.beta2)

    def init(self, theta: Tensor) -> AdamState:
        if not theta.is_contiguous():  # the kernel walks through memory, whatever the strides say
            raise ValueError(f"Adam: theta must be contiguous. Got strides {theta.stride()}. Pass theta.contiguous().")
        return AdamState(torch.zeros_like(theta), torch.zeros_like(theta), torch.zeros((), device=theta.device))

    def ascend(self, theta: Tensor, grad: Tensor, state: AdamState, step_size: StepSize, divisor: float) -> AdamState:
        state.steps.add_(1)
        torch._fused_adam_(  # type: ignore[call-overload, unused-ignore]
            [theta],
            [grad.contiguous()],
            [state.first],
            [state.second],
            [],
            [state.steps],
            lr=step_size.float() if isinstance(step_size, Tensor) else step_size,
            beta1=self.beta1,
            beta2=self.beta2,
            weight_decay=0.0,
            eps=self.epsilon,
            amsgrad=False,
            maximize=True,
            # The kernel divides the gradient by this, in place.
            grad_scale=torch.full((), divisor, dtype=torch.float32, device=theta.device),
        )
        return state

    def ascend_proximal(
        self, theta: Tensor, grad: Tensor, state: AdamState, step_size: StepSize, divisor: float, proximal: Proximal
    ) -> AdamState:
        state = self.ascend(theta, grad, state, step_size, divisor)
        spread = 1.0 - self.beta2 ** state.steps.double()  # float32 would lose the first steps' digits
        metric = (state.second / spread.to(theta.dtype)).sqrt_().add_(self.epsilon)
        # The kernel's own step size: a difference in the last digits would move the fixed point.
        steps = (step_size.float() if isinstance(step_size, Tensor) else step_size) / metric
        theta.copy_(proximal(theta, steps))
        return state


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
        return SGDState(torch.zeros_like(theta))

    def ascend(self, theta: Tensor, grad: Tensor, state: SGDState, step_size: StepSize, divisor: float) -> SGDState:
        if theta.is_cuda and theta.dtype == torch.float32 and self.momentum:
            return self.fused(theta, grad, state, step_size, divisor)
        velocity = state.velocity.mul_(self.momentum).add_(grad, alpha=1.0 / divisor)
        direction = velocity * self.momentum + grad / divisor if self.nesterov else velocity
        if isinstance(step_size, Tensor):
            theta.addcmul_(direction, step_size)
        else:
            theta.add_(direction, alpha=step_size)
        return state

    def fused(self, theta: Tensor, grad: Tensor, state: SGDState, step_size: StepSize, divisor: float) -> SGDState:
        """Ascend by one kernel, which reads and writes a third as much, in float32 and with momentum."""
        torch._fused_sgd_(  # type: ignore[call-overload, unused-ignore]
            [theta],
            [grad.contiguous()],
            [state.velocity],
            weight_decay=0.0,
            momentum=self.momentum,
            lr=-step_size.float() if isinstance(step_size, Tensor) else -step_size,
            dampening=0.0,
            nesterov=self.nesterov,
            maximize=False,  # which would turn the sign of the velocity, too
            is_first_step=False,
            # The kernel divides the gradient by this, in place.
            grad_scale=torch.full((), divisor, dtype=torch.float32, device=theta.device),
        )
        return state

    def ascend_proximal(
        self, theta: Tensor, grad: Tensor, state: SGDState, step_size: StepSize, divisor: float, proximal: Proximal
    ) -> SGDState:
        state = self.ascend(theta, grad, state, step_size, divisor)
        step = step_size * (1.0 + self.momentum) if self.nesterov else step_size  # p is in g and in v
        reached = proximal(theta, step)
        least = torch.finfo(theta.dtype).tiny  # a step of size 0 moves nothing, and has no subgradient
        divided_by = step.clamp_min(least) if isinstance(step, Tensor) else max(step, least)
        state.velocity.sub_((theta - reached) / divided_by)  # the velocity takes up the subgradient
        theta.copy_(reached)
        return state
