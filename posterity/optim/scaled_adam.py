"""Adam in units that the method supplies, such as the standard deviations of its q."""

from dataclasses import dataclass

import torch
from torch import Tensor

from posterity.errors import fraction, positive
from posterity.optim.optimizer import Adam, AdamState, Optimizer, StepSize


@dataclass(frozen=True)
class ScaledAdam(Optimizer):
    """Adam whose steps are measured in units, one for each parameter, that a variational method supplies.

    **Math**: Adam on u, where theta = theta_0 + units * u, so that a step is at most about step_size units. Methods
    that know the scales of their q thus need no step size that suits the units of the data. Without units it is Adam.

    **Limit**: the steps do not shrink by themselves near an optimum; use a schedule that ends at zero.

    **Cost**: as Adam, and two passes over the parameters.

    **References**: Kingma and Ba (2015), Algorithm 1.

    **Example**:

    >>> theta = torch.zeros(2)
    >>> optimizer = ScaledAdam(step_size=0.1)
    >>> units = torch.tensor([1.0, 0.1])
    >>> state = optimizer.ascend_in(units, theta, torch.tensor([1.0, -2.0]), optimizer.init(theta), 0.1)
    >>> theta
    tensor([ 0.1000, -0.0100])
    """

    step_size: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.99

    def __post_init__(self) -> None:
        positive("ScaledAdam.step_size", self.step_size)
        fraction("ScaledAdam.beta1", self.beta1)
        fraction("ScaledAdam.beta2", self.beta2)

    @property
    def _adam(self) -> Adam:
        return Adam(self.step_size, self.beta1, self.beta2)

    def init(self, theta: Tensor) -> AdamState:
        return self._adam.init(theta)

    def ascend(self, theta: Tensor, grad: Tensor, state: AdamState, step_size: StepSize, divisor: float) -> AdamState:
        return self._adam.ascend(theta, grad, state, step_size, divisor)

    def ascend_in(self, units: Tensor, theta: Tensor, grad: Tensor, state: AdamState, step_size: StepSize) -> AdamState:
        """Move `theta` in place along `grad` by steps in these units; `grad` may be overwritten."""
        moved = torch.zeros_like(theta)
        state = self._adam.ascend(moved, grad.mul_(units), state, step_size, 1.0)
        theta.addcmul_(moved, units)
        return state
