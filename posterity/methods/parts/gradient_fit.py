"""Settings and steps of methods that ascend an objective by gradients on mini-batches."""

from typing import Any

from torch import Tensor

from posterity.errors import check_batch_size, of_kinds, positive_whole
from posterity.inference.method import Method
from posterity.model import Data, Feed, Problem
from posterity.numerics.random import Key
from posterity.optim import Optimizer, Schedule


class GradientFit(Method):
    """`steps` steps of `optimizer` on batches of `batch_size` rows; states have the fields `optimizer` and `step`."""

    steps: int
    batch_size: int | None
    schedule: Schedule
    optimizer: Optimizer

    def __post_init__(self) -> None:
        positive_whole(f"{type(self).__name__}.steps", self.steps)
        check_batch_size(f"{type(self).__name__}.batch_size", self.batch_size)
        of_kinds(self, optimizer=Optimizer, schedule=Schedule)

    def batches(self, data: Data, key: Key) -> Feed:
        return data.minibatches(self.batch_size, self.steps, key)

    def _step_size(self, state: Any) -> float | Tensor:
        return self.optimizer.step_size * self.schedule.factor(state.step, self.steps)

    def _ascended(self, joint: Problem, parameters: Tensor, grad: Tensor, state: Any) -> Any:
        """Move the parameters in place along the gradient; returns the optimiser's moments."""
        return self.optimizer.ascend(parameters, grad, state.optimizer, self._step_size(state), joint.num_data)

    def keep(self, state: Any) -> Any:
        return state._replace(optimizer=None)
