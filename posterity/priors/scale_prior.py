"""Densities of a positive scale, for priors whose scale is unknown."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from posterity.errors import positive
from posterity.numerics.random import Key

_HALF_LOG_TWO_PI = 0.5 * math.log(2.0 * math.pi)


class ScalePrior(ABC):
    """A density of s > 0, stated for log s, in which it must be log-concave."""

    @abstractmethod
    def log_density(self, log_scale: Tensor) -> Tensor:
        """Log density of log s, entry by entry."""

    @abstractmethod
    def slope(self, log_scale: Tensor) -> Tensor:
        """Derivative of `log_density`."""

    @abstractmethod
    def curvature(self, log_scale: Tensor) -> Tensor:
        """Minus the second derivative of `log_density`; it is not negative."""

    @property
    @abstractmethod
    def peak(self) -> float:
        """Where `log_density` is highest."""

    @property
    @abstractmethod
    def second_moment(self) -> float:
        """E s^2; nan where not even E s is finite."""

    @property
    @abstractmethod
    def has_inverse_moments(self) -> bool:
        """Whether E s^-n is finite for every n."""

    @abstractmethod
    def sample(self, shape: tuple[int, ...], key: Key, device: torch.device) -> Tensor:
        """Draws of s in float64."""


@dataclass(frozen=True)
class LogNormal(ScalePrior):
    """A scale known up to a factor.

    **Math**: log s ~ N(log median, spread^2): s lies within a factor e^spread of `median` with probability 0.68.

    **Limit**: the tails are light on both sides of log s, so that weights keep all moments.

    **Cost**: none to speak of; one number a tensor.

    **References**: Johnson, Kotz and Balakrishnan (1994), Continuous Univariate Distributions 1, chapter 14.

    **Example**:

    >>> round(LogNormal(median=0.1, spread=0.5).second_moment, 4)
    0.0165
    """

    median: float = 1.0
    spread: float = 1.0

    def __post_init__(self) -> None:
        positive("LogNormal.median", self.median)
        positive("LogNormal.spread", self.spread)

    def log_density(self, log_scale: Tensor) -> Tensor:
        """Log density of N(log median, spread^2)."""
        return -0.5 * ((log_scale - self.peak) / self.spread).square() - (math.log(self.spread) + _HALF_LOG_TWO_PI)

    def slope(self, log_scale: Tensor) -> Tensor:
        """-(log s - log median) / spread^2."""
        return (self.peak - log_scale) / self.spread**2

    def curvature(self, log_scale: Tensor) -> Tensor:
        """1 / spread^2."""
        return torch.full_like(log_scale, self.spread**-2)

    @property
    def peak(self) -> float:
        """log median."""
        return math.log(self.median)

    @property
    def second_moment(self) -> float:
        """median^2 exp(2 spread^2)."""
        return self.median**2 * math.exp(2.0 * self.spread**2)

    @property
    def has_inverse_moments(self) -> bool:
        """It has."""
        return True

    def sample(self, shape: tuple[int, ...], key: Key, device: torch.device) -> Tensor:
        """median exp(spread z)."""
        return self.median * torch.exp(self.spread * key.normal(shape, torch.float64, device))


@dataclass(frozen=True)
class HalfCauchy(ScalePrior):
    """A scale that may be anything, from zero to far above `scale`.

    **Math**: p(s) = 2 / (pi scale (1 + (s / scale)^2)), so that log s - log scale has density sech / pi, and `scale` is
    the median.

    **Limit**: s has no mean, so weights have no variance; s may be zero, so the weights' density is infinite at zero.

    **Cost**: none to speak of; one number a tensor.

    **References**: Gelman (2006), Prior distributions for variance parameters in hierarchical models; Polson and Scott
    (2012), On the half-Cauchy prior for a global scale parameter.

    **Example**:

    >>> round(HalfCauchy(scale=2.0).log_density(torch.tensor(2.0).log()).exp().item() * math.pi, 4)
    1.0
    """

    scale: float = 1.0

    def __post_init__(self) -> None:
        positive("HalfCauchy.scale", self.scale)

    def log_density(self, log_scale: Tensor) -> Tensor:
        """log sech(log s - log scale) - log pi."""
        distance = (log_scale - self.peak).abs()
        return math.log(2.0 / math.pi) - distance - torch.log1p(torch.exp(-2.0 * distance))

    def slope(self, log_scale: Tensor) -> Tensor:
        """-tanh(log s - log scale)."""
        return -torch.tanh(log_scale - self.peak)

    def curvature(self, log_scale: Tensor) -> Tensor:
        """sech(log s - log scale)^2."""
        return 1.0 - self.slope(log_scale).square()

    @property
    def peak(self) -> float:
        """log scale."""
        return math.log(self.scale)

    @property
    def second_moment(self) -> float:
        """Nan: s has no mean."""
        return math.nan

    @property
    def has_inverse_moments(self) -> bool:
        """It has none."""
        return False

    def sample(self, shape: tuple[int, ...], key: Key, device: torch.device) -> Tensor:
        """By inversion: scale tan(pi u / 2)."""
        return self.scale * torch.tan(0.5 * math.pi * key.uniform(shape, torch.float64, device))
