"""Ascent steps on one flat vector."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeAlias

from torch import Tensor

Proximal: TypeAlias = Callable[[Tensor, float | Tensor], Tensor]
"""proximal(theta, step): argmin over w of sum of (w - theta)^2 / (2 step) + h(w); step is a number, () or (..., P)."""


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

    def ascend_proximal(
        self, theta: Tensor, grad: Tensor, state: Any, step_size: float | Tensor, divisor: float, proximal: Proximal
    ) -> Any:
        """As `ascend` on f - h, where `grad / divisor` is the gradient of f and `proximal` that operator of h.

        theta comes to rest at stationary points of f - h and nowhere else, whatever the momentum.
        """
        raise TypeError(
            f"{type(self).__name__} has no proximal steps. Use Adam or SGD, or give it a method ascend_proximal."
        )
