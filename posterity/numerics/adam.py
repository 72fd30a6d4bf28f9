"""Adam on one flat vector, as a single fused kernel."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from posterity.errors import fraction, positive
from posterity.numerics.optimizer import Optimizer, Proximal


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
        for name in ("beta1", "beta2"):
            fraction(f"Adam.{name}", getattr(self, name))

    def init(self, theta: Tensor) -> AdamState:
        """Zero moments."""
        if not theta.is_contiguous():  # the kernel walks through memory, whatever the strides say
            raise ValueError(f"Adam: theta must be contiguous. Got strides {theta.stride()}. Pass theta.contiguous().")
        return AdamState(torch.zeros_like(theta), torch.zeros_like(theta), torch.zeros((), device=theta.device))

    def ascend(
        self, theta: Tensor, grad: Tensor, state: AdamState, step_size: float | Tensor, divisor: float
    ) -> AdamState:
        """One fused step in place; the kernel divides the gradient by `divisor`, in place too."""
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
            grad_scale=torch.full((), divisor, dtype=torch.float32, device=theta.device),
        )
        return state

    def ascend_proximal(
        self,
        theta: Tensor,
        grad: Tensor,
        state: AdamState,
        step_size: float | Tensor,
        divisor: float,
        proximal: Proximal,
    ) -> AdamState:
        """One fused step, and the proximal step with its step sizes by weight."""
        state = self.ascend(theta, grad, state, step_size, divisor)
        spread = 1.0 - self.beta2 ** state.steps.double()  # float32 would lose the first steps' digits
        metric = (state.second / spread.to(theta.dtype)).sqrt_().add_(self.epsilon)
        # The kernel's own step size: one that differs in the last digits would move the point of rest.
        steps = (step_size.float() if isinstance(step_size, Tensor) else step_size) / metric
        theta.copy_(proximal(theta, steps))
        return state
