"""Ascent steps on one flat vector."""

from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor


class Optimizer(ABC):
    """Moves theta along a gradient to be climbed. A value: its moments live in the state it makes."""

    step_size: float

    @abstractmethod
    def init(self, theta: Tensor) -> Any:
        """The state (a NamedTuple of tensors) before the first step."""

    @abstractmethod
    def ascend(self, theta: Tensor, grad: Tensor, state: Any, step_size: float | Tensor, divisor: float) -> Any:
        """Move `theta` in place along `grad / divisor` and return the next state.

        The tensors of the state may be reused, and `grad` may be overwritten. theta and grad are contiguous. A step
        size that is a tensor () on the device of theta is not to be read, only used.
        """
