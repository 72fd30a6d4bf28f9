"""Moments of activations of Gaussian neurons."""

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


_RECTIFIED_NODES = 160  # of the Gauss-Legendre rule
_REACH = 10.0  # standard deviations: the mass beyond is 1e-23
_PHASE = 60.0  # radians over the whole range that the rule resolves to the last digits; beyond: the closed form


@dataclass(frozen=True)
class Rectified(Activation):
    """The rectifier r = max(u, 0) under u ~ N(m, s^2).

    **Math**: with z = m / s, E r = m Phi(z) + s phi(z) and E r^2 = (m^2 + s^2) Phi(z) + m s phi(z). The
    characteristic function of a r is Phi(-z) + exp(-z^2 / 2) w(-i Z / sqrt 2) / (2 sqrt(k)) with k = 1 + (t s s_a)^2,
    Z = (z + i t m_a s) / sqrt(k) and the complex error function w. Times t at which a r turns by little have an
    integral over u instead, of differences from 1 that are never subtracted.

    **Limit**: exact to rounding.

    **Cost**: 160 evaluations of exp, cos and sin for a characteristic function at one time.
    """

    def __call__(self, values: Tensor) -> Tensor:
        return torch.relu(values)

    def mean(self, mean: Tensor, scale: Tensor) -> Tensor:
        return self.moments(mean, scale).mean

    def moments(self, mean: Tensor, scale: Tensor) -> Moments:
        """See `Activation`; for z > 0 by what is cut off, for z < 0 by what is left."""
        z = mean / scale
        density, left, cut = _density(z), _normal(z), _normal(-z)
        # E max(-u, 0) / s and E max(-u, 0)^2 / s^2, by which r differs from u
        first, second = density - z * cut, (1.0 + z.square()) * cut - z * density
        above = (z + first, 1.0 + z.square() - second, 1.0 - second - 2.0 * z * first - first.square())
        mirrored, mirrored_second = density + z * left, (1.0 + z.square()) * left + z * density
        below = (mirrored, mirrored_second, mirrored_second - mirrored.square())
        unit = [torch.where(z > 0.0, one, other) for one, other in zip(above, below, strict=True)]
        return Moments(scale * unit[0], scale.square() * unit[1], scale.square() * unit[2])

    def characteristic(
        self, outer_mean: Tensor, outer_scale: Tensor, mean: Tensor, scale: Tensor, times: Tensor
    ) -> Tensor:
        """See `Activation`; by quadrature, or in closed form where that could not follow."""
        centre = outer_mean * self.mean(mean, scale)  # E phi
        found = _by_quadrature(outer_mean, outer_scale, mean, scale, times, centre)
        highest, lowest = (torch.clamp(mean + sign * _REACH * scale, min=0.0) for sign in (1.0, -1.0))
        beyond = times * (outer_mean.abs() + outer_scale) * (highest - lowest) > _PHASE
        if not bool(beyond.any()):
            return found
        closed = _closed_form(outer_mean, outer_scale, mean, scale, times)
        turned = closed * torch.exp(torch.complex(torch.zeros_like(times * centre), -times * centre)) - 1.0
        return torch.where(beyond, turned, found)


def _by_quadrature(
    outer_mean: Tensor, outer_scale: Tensor, mean: Tensor, scale: Tensor, times: Tensor, centre: Tensor
) -> Tensor:
    """Phi(-z) (e^(-i t E phi) - 1) + the integral over u > 0 of N(u; m, s^2) (e^(i t (m_a u - E phi) - ...) - 1)."""
    nodes, weights = (value.to(mean.device) for value in _legendre())
    z = (mean / scale).unsqueeze(-1)
    lower = torch.clamp(-z, -_REACH, _REACH)
    half = 0.5 * (_REACH - lower)
    places = lower + half * (1.0 + nodes)  # (..., Q), in standard deviations
    masses = half * weights * _density(places)
    heights = mean.unsqueeze(-1) + scale.unsqueeze(-1) * places
    times, centre = times.unsqueeze(-1), centre.unsqueeze(-1)
    turn = times * (outer_mean.unsqueeze(-1) * heights - centre)
    fading = -0.5 * (times * outer_scale.unsqueeze(-1) * heights).square()
    active = (masses * complex_expm1(fading, turn)).sum(-1)
    at_rest = times * centre
    return active + (_normal(-z) * complex_expm1(torch.zeros_like(at_rest), -at_rest)).squeeze(-1)


def _closed_form(outer_mean: Tensor, outer_scale: Tensor, mean: Tensor, scale: Tensor, times: Tensor) -> Tensor:
    """E exp(i t phi)."""
    z = mean / scale
    widened = 1.0 + (times * outer_scale * scale).square()  # k
    root = widened.sqrt()
    place = torch.complex(z + 0.0 * times, times * outer_mean * scale + 0.0 * z) / (math.sqrt(2.0) * root)  # Z / sqrt 2
    positive = z > 0.0
    # Always from the half plane where |w| <= 1; the mirror image of the other is the whole integral over u.
    half = 0.5 * torch.exp(-0.5 * z.square()) * faddeeva(torch.where(positive, place, -place) * 1.0j)
    exponent = torch.complex(
        -0.5 * times.square() * ((outer_mean * scale).square() + (outer_scale * mean).square()),
        times * outer_mean * mean + 0.0 * outer_scale,
    )
    active = torch.where(positive, torch.exp(exponent / widened) - half, half)
    return _normal(-z) + active / root


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

    **Limit**: to 1e-10 or better: nodes crowd around zero, where the function bends, so that s may be large. Times t
    at which a sigma(u) turns by more than some hundred radians are too fast for them.

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

    def characteristic(
        self, outer_mean: Tensor, outer_scale: Tensor, mean: Tensor, scale: Tensor, times: Tensor
    ) -> Tensor:
        places, masses = crowded_nodes(mean.unsqueeze(-1), scale.unsqueeze(-1), _SMOOTH_NODES, width=1.0)
        masses = masses / masses.sum(-1, keepdim=True)
        heights = self(mean.unsqueeze(-1) + scale.unsqueeze(-1) * places)  # (..., Q)
        centre = outer_mean.unsqueeze(-1) * (masses * heights).sum(-1, keepdim=True)
        turn = times.unsqueeze(-1) * (outer_mean.unsqueeze(-1) * heights - centre)
        fading = -0.5 * (times.unsqueeze(-1) * outer_scale.unsqueeze(-1) * heights).square()
        return (masses * complex_expm1(fading, turn)).sum(-1)
