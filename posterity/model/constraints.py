"""Smooth maps from unconstrained numbers to constrained ones, with their log-Jacobians."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from posterity.errors import positive


class Constraint(ABC):
    """A bijection T from unconstrained tensors to the set a parameter lives in."""

    def unconstrained_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of u for values of `shape`."""
        return shape

    @abstractmethod
    def forward(self, unconstrained: Tensor) -> tuple[Tensor, Tensor]:
        """T(u) and the log |dT/du| of each independent piece (summed by the caller)."""

    @abstractmethod
    def inverse(self, value: Tensor) -> Tensor:
        """u with T(u) = value."""


@dataclass(frozen=True)
class Real(Constraint):
    """No constraint.

    >>> Real().forward(torch.tensor(2.0))
    (tensor(2.), tensor(0.))
    """

    def forward(self, unconstrained: Tensor) -> tuple[Tensor, Tensor]:
        """u itself."""
        return unconstrained, torch.zeros_like(unconstrained)

    def inverse(self, value: Tensor) -> Tensor:
        """The value itself."""
        return value


@dataclass(frozen=True)
class Positive(Constraint):
    """v = exp(u) > 0.

    >>> value, log_jacobian = Positive().forward(torch.tensor(0.0))
    >>> float(value), float(log_jacobian)
    (1.0, 0.0)
    """

    def forward(self, unconstrained: Tensor) -> tuple[Tensor, Tensor]:
        """exp(u), with log-Jacobian u."""
        return unconstrained.exp(), unconstrained

    def inverse(self, value: Tensor) -> Tensor:
        """log v."""
        return value.log()


@dataclass(frozen=True)
class Interval(Constraint):
    """lower < v < upper by a scaled sigmoid.

    >>> float(Interval(0.0, 2.0).forward(torch.tensor(0.0))[0])
    1.0
    """

    lower: float = 0.0
    upper: float = 1.0

    def __post_init__(self) -> None:
        positive("Interval: upper - lower", self.upper - self.lower)

    def forward(self, unconstrained: Tensor) -> tuple[Tensor, Tensor]:
        """lower + width * sigmoid(u)."""
        width = self.upper - self.lower
        log_jacobian = math.log(width) + F.logsigmoid(unconstrained) + F.logsigmoid(-unconstrained)
        return self.lower + width * torch.sigmoid(unconstrained), log_jacobian

    def inverse(self, value: Tensor) -> Tensor:
        """logit of the position inside the interval."""
        return (value - self.lower).log() - (self.upper - value).log()


@dataclass(frozen=True)
class Ordered(Constraint):
    """v_1 < v_2 < ... along the last axis: v_1 = u_1, v_k = v_{k-1} + exp(u_k).

    >>> Ordered().forward(torch.zeros(3))[0]
    tensor([0., 1., 2.])
    """

    def unconstrained_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The same shape, which must have an axis."""
        if not shape:
            raise ValueError("Ordered needs an axis to order along. Got shape (). Use Real for a single number.")
        return shape

    def forward(self, unconstrained: Tensor) -> tuple[Tensor, Tensor]:
        """Cumulative sums of exponentials; the log-Jacobian is the sum of u_2 .. u_K."""
        first, rest = unconstrained[..., :1], unconstrained[..., 1:]
        return torch.cat([first, rest.exp()], -1).cumsum(-1), rest.sum(-1)

    def inverse(self, value: Tensor) -> Tensor:
        """The first value and the logs of the gaps."""
        return torch.cat([value[..., :1], value.diff(dim=-1).log()], -1)


@dataclass(frozen=True)
class Simplex(Constraint):
    """v_k > 0, sum v = 1 along the last axis, by stick breaking from K - 1 numbers; u = 0 is the centre.

    >>> Simplex().forward(torch.zeros(3))[0]
    tensor([0.2500, 0.2500, 0.2500, 0.2500])
    """

    def unconstrained_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """One number fewer along the last axis, which must have two or more."""
        if not shape or shape[-1] < 2:
            raise ValueError(f"Simplex needs at least two parts along the last axis. Got shape {shape}.")
        return (*shape[:-1], shape[-1] - 1)

    def _offset(self, count: int, like: Tensor) -> Tensor:
        return torch.arange(count, 0, -1, dtype=like.dtype, device=like.device).log()

    def forward(self, unconstrained: Tensor) -> tuple[Tensor, Tensor]:
        """v_k = z_k * (stick left), z_k = sigmoid(u_k - log(K - k))."""
        shifted = unconstrained - self._offset(unconstrained.shape[-1], unconstrained)
        log_left = F.logsigmoid(-shifted).cumsum(-1)  # log of the stick left after each break
        before = F.pad(log_left[..., :-1], (1, 0))
        log_part = F.logsigmoid(shifted) + before
        value = torch.cat([log_part, log_left[..., -1:]], -1).exp()
        return value, (F.logsigmoid(shifted) + F.logsigmoid(-shifted) + before).sum(-1)

    def inverse(self, value: Tensor) -> Tensor:
        """logit of each part's share of the stick left, shifted back."""
        after = value.flip(-1).cumsum(-1).flip(-1)[..., 1:]  # what is left of the stick after each part
        return value[..., :-1].log() - after.log() + self._offset(after.shape[-1], value)
