"""What the theory of wide networks asks of an activation function."""

from abc import ABC, abstractmethod
from typing import NamedTuple

from torch import Tensor


class Moments(NamedTuple):
    """Of r = sigma(u) with u normal, entry by entry."""

    mean: Tensor
    second: Tensor  # E r^2
    variance: Tensor  # without the cancellation of E r^2 - (E r)^2


class Activation(ABC):
    """sigma, with its expectations under a normal pre-activation."""

    @abstractmethod
    def __call__(self, values: Tensor) -> Tensor:
        """sigma(u), entry by entry."""

    @abstractmethod
    def mean(self, mean: Tensor, scale: Tensor) -> Tensor:
        """E sigma(u), u ~ N(mean, scale^2), entry by entry; differentiable."""

    @abstractmethod
    def moments(self, mean: Tensor, scale: Tensor) -> Moments:
        """Mean, second moment and variance likewise."""

    @abstractmethod
    def characteristic(
        self, outer_mean: Tensor, outer_scale: Tensor, mean: Tensor, scale: Tensor, times: Tensor
    ) -> Tensor:
        """E exp(i t (phi - E phi)) - 1 for phi = a sigma(u), a ~ N(outer_mean, outer_scale^2), u ~ N(mean, scale^2).

        The five broadcast; complex128. The real part has its digits however small t is, and so has the imaginary part
        up to rounding of t E phi.
        """
