"""Moments and characteristic functions of activations under normal pre-activations."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from posterity.errors import unknown
from posterity.special.activations import ACTIVATIONS
from posterity.special.functions import complex_expm1, faddeeva
from posterity.special.quadrature import crowded_nodes, normal_expectation


class Moments(NamedTuple):
    """Moments of r = sigma(u) for normal u, entry by entry."""

    mean: Tensor
    second: Tensor  # E r^2
    variance: Tensor  # without the cancellation of E r^2 - (E r)^2


class Activation(ABC):
    """An activation sigma with its expectations under a normal pre-activation."""

    @abstractmethod
    def __call__(self, values: Tensor) -> Tensor:
        """sigma(u), entry by entry."""

    @abstractmethod
    def mean(self, mean: Tensor, scale: Tensor) -> Tensor:
        """E sigma(u), u ~ N(mean, scale^2), entry by entry; differentiable."""

    @abstractmethod
    def moments(self, mean: Tensor, scale: Tensor) -> Moments:
        """Mean, second moment and variance of sigma(u), u ~ N(mean, scale^2), entry by entry."""

    @abstractmethod
    def characteristic(self, outer_mean: Tensor, outer_scale: Tensor, mean: Tensor, scale: Tensor, t: Tensor) -> Tensor:
        """E exp(i t (phi - E phi)) - 1 for phi = a sigma(u), a ~ N(outer_mean, outer_scale^2), u ~ N(mean, scale^2).

        The arguments broadcast; the result is complex128. The real part keeps its relative accuracy for small t, and so
        does the imaginary part up to rounding of t E phi.
        """


_RECTIFIED_NODES = 160  # of the Gauss-Legendre rule
_REACH = 10.0  # standard deviations: the mass beyond is 1e-23
_PHASE = 60.0  # radians over the whole range that the rule resolves to the last digits; beyond: the closed form


@dataclass(frozen=True)
class Rectified(Activation):
    """The rectifier r = max(u, 0) under u ~ N(m, s^2).

    **Math**: with z = m / s, E r = m Phi(z) + s phi(z) and E r^2 = (m^2 + s^2) Phi(z) + m s phi(z). The
    characteristic function of a r is Phi(-z) + exp(-z^2 / 2) w(-i Z / sqrt 2) / (2 sqrt(k)) with k = 1 + (t s s_a)^2,
    Z = (z + i t m_a s) / sqrt(k) and the complex error function w. For t at which t a r is small, quadrature over u of
    the difference from 1 avoids cancellation.

    **Limit**: exact to rounding.

    **Cost**: 160 evaluations of exp, cos and sin for a characteristic function at one t.
    """

    def __call__(self, values: Tensor) -> Tensor:
        return torch.relu(values)

    def mean(self, mean: Tensor, scale: Tensor) -> Tensor:
        return self.moments(mean, scale).mean

    def moments(self, mean: Tensor, scale: Tensor) -> Moments:
        # For z > 0 from the part of u that is cut off, for z < 0 from the part that is left.
        z = mean / scale
        density, left, cut = _density(z), _normal(z), _normal(-z)
        # E max(-u, 0) / s and E max(-u, 0)^2 / s^2, since r = u + max(-u, 0)
        first, second = density - z * cut, (1.0 + z.square()) * cut - z * density
        above = (z + first, 1.0 + z.square() - second, 1.0 - second - 2.0 * z * first - first.square())
        mirrored, mirrored_second = density + z * left, (1.0 + z.square()) * left + z * density
        below = (mirrored, mirrored_second, mirrored_second - mirrored.square())
        first, second, variance = (torch.where(z > 0.0, *pair) for pair in zip(above, below, strict=True))
        return Moments(scale * first, scale.square() * second, scale.square() * variance)

    def characteristic(self, outer_mean: Tensor, outer_scale: Tensor, mean: Tensor, scale: Tensor, t: Tensor) -> Tensor:
        # By quadrature, or in closed form where the integrand oscillates too fast for its nodes.
        centre = outer_mean * self.mean(mean, scale)  # E phi
        slow = _by_quadrature(outer_mean, outer_scale, mean, scale, t, centre)
        highest, lowest = (torch.clamp(mean + sign * _REACH * scale, min=0.0) for sign in (1.0, -1.0))
        beyond = t * (outer_mean.abs() + outer_scale) * (highest - lowest) > _PHASE
        if not bool(beyond.any()):
            return slow
        closed = _closed_form(outer_mean, outer_scale, mean, scale, t)
        fast = closed * torch.exp(torch.complex(torch.zeros_like(t * centre), -t * centre)) - 1.0
        return torch.where(beyond, fast, slow)


def _by_quadrature(
    outer_mean: Tensor, outer_scale: Tensor, mean: Tensor, scale: Tensor, t: Tensor, centre: Tensor
) -> Tensor:
    """Phi(-z) (e^(-i t E phi) - 1) + the integral over u > 0 of N(u; m, s^2) (e^(i t (m_a u - E phi) - ...) - 1)."""
    nodes, weights = (value.to(mean.device) for value in _legendre())
    z = (mean / scale).unsqueeze(-1)
    lower = torch.clamp(-z, -_REACH, _REACH)
    half = 0.5 * (_REACH - lower)
    points = lower + half * (1.0 + nodes)  # (..., Q), in standard deviations
    masses = half * weights * _density(points)
    heights = mean.unsqueeze(-1) + scale.unsqueeze(-1) * points
    t, centre = t.unsqueeze(-1), centre.unsqueeze(-1)
    phase = t * (outer_mean.unsqueeze(-1) * heights - centre)
    decay = -0.5 * (t * outer_scale.unsqueeze(-1) * heights).square()
    active = (masses * complex_expm1(decay, phase)).sum(-1)
    return active + (_normal(-z) * complex_expm1(torch.zeros_like(t * centre), -(t * centre))).squeeze(-1)


def _closed_form(outer_mean: Tensor, outer_scale: Tensor, mean: Tensor, scale: Tensor, t: Tensor) -> Tensor:
    """E exp(i t phi)."""
    z = mean / scale
    k = 1.0 + (t * outer_scale * scale).square()
    argument = torch.complex(z + 0.0 * t, t * outer_mean * scale + 0.0 * z) / (math.sqrt(2.0) * k.sqrt())  # Z / sqrt 2
    positive = z > 0.0
    # Always from the half plane where |w| <= 1; the mirror image of the other is the whole integral over u.
    half = 0.5 * torch.exp(-0.5 * z.square()) * faddeeva(torch.where(positive, argument, -argument) * 1.0j)
    exponent = torch.complex(
        -0.5 * t.square() * ((outer_mean * scale).square() + (outer_scale * mean).square()),
        t * outer_mean * mean + 0.0 * outer_scale,
    )
    active = torch.where(positive, torch.exp(exponent / k) - half, half)
    return _normal(-z) + active / k.sqrt()


def _density(values: Tensor) -> Tensor:
    """The standard normal density."""
    return torch.exp(-0.5 * values.square()) / math.sqrt(2.0 * math.pi)


def _normal(values: Tensor) -> Tensor:
    """The standard normal distribution function."""
    return 0.5 * torch.erfc(-values / math.sqrt(2.0))


@lru_cache(maxsize=1)
def _legendre() -> tuple[Tensor, Tensor]:
    """Nodes and weights on [-1, 1], (Q,), on the CPU."""
    nodes, weights = np.polynomial.legendre.leggauss(_RECTIFIED_NODES)
    return torch.from_numpy(nodes), torch.from_numpy(weights)


_FUNCTIONS = {name: ACTIVATIONS[name] for name in ("tanh", "erf", "sigmoid", "gelu", "silu")}
_SMOOTH_NODES = 401  # of the trapezoid rule for characteristic functions


@dataclass(frozen=True)
class Smooth(Activation):
    """tanh, erf, sigmoid, gelu or silu, by name.

    **Math**: expectations under u ~ N(m, s^2) by the trapezoid rule over m +- 9 s, which for analytic functions
    converges faster than any power. E erf(u) = erf(m / sqrt(1 + 2 s^2)).

    **Limit**: to 1e-10 or better: nodes crowd around zero, where the function bends, so that s may be large. They do
    not resolve t at which t a sigma(u) spans more than some hundred radians.

    **Cost**: 401 evaluations of the function for each moment, and of exp, cos and sin for a characteristic function.

    >>> Smooth("tanh").moments(torch.tensor(0.0), torch.tensor(1.0)).second
    tensor(0.3943)
    """

    name: str

    def __post_init__(self) -> None:
        if self.name not in _FUNCTIONS:
            raise ValueError(unknown("activation", str(self.name), _FUNCTIONS))

    def __call__(self, values: Tensor) -> Tensor:
        return _FUNCTIONS[self.name](values)

    def mean(self, mean: Tensor, scale: Tensor) -> Tensor:
        if self.name == "erf":
            return torch.erf(mean / torch.sqrt(1.0 + 2.0 * scale.square()))
        return normal_expectation(self, mean, scale, width=1.0)

    def moments(self, mean: Tensor, scale: Tensor) -> Moments:
        first = self.mean(mean, scale)
        second = normal_expectation(lambda u: self(u).square(), mean, scale, width=1.0)
        return Moments(first, second, second - first.square())

    def characteristic(self, outer_mean: Tensor, outer_scale: Tensor, mean: Tensor, scale: Tensor, t: Tensor) -> Tensor:
        points, masses = crowded_nodes(mean.unsqueeze(-1), scale.unsqueeze(-1), _SMOOTH_NODES, width=1.0)
        masses = masses / masses.sum(-1, keepdim=True)
        heights = self(mean.unsqueeze(-1) + scale.unsqueeze(-1) * points)  # (..., Q)
        centre = outer_mean.unsqueeze(-1) * (masses * heights).sum(-1, keepdim=True)
        phase = t.unsqueeze(-1) * (outer_mean.unsqueeze(-1) * heights - centre)
        decay = -0.5 * (t.unsqueeze(-1) * outer_scale.unsqueeze(-1) * heights).square()
        return (masses * complex_expm1(decay, phase)).sum(-1)
