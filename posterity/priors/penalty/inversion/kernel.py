"""The density beta_0 that smooths log alpha: what an inversion has to know of one member of a family."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

_HALF_LOG_TWO_PI_E = 0.5 * math.log(2.0 * math.pi * math.e)


class Kernel(ABC):
    """X ~ beta_0, the member of a translation family at mu = 0, so that w = mu + X; in float64.

    r(mu) = -entropy - E log alpha(mu + X): the convolution is with the reflection of beta_0, which is what an
    expectation over mu + X is.
    """

    @property
    @abstractmethod
    def entropy(self) -> float:
        """-E log beta_0(X), in nats."""

    @property
    @abstractmethod
    def scale(self) -> float:
        """The standard deviation of X."""

    @abstractmethod
    def moments(self, order: int) -> Tensor:
        """E X^n for n = 0 ... order, (order + 1,)."""

    @abstractmethod
    def characteristic(self, frequency: Tensor) -> Tensor:
        """E exp(i k X) for frequencies k (...), complex (...)."""

    @abstractmethod
    def nodes(self) -> tuple[Tensor, Tensor]:
        """Points x and weights of sum 1, (Q,) each, with E f(X) close to the sum of weights times f(x) for smooth f."""

    def smooth(self, function: Callable[[Tensor], Tensor], mu: Tensor) -> Tensor:
        """E f(mu + X), (N,) -> (N,), by the nodes."""
        offsets, weights = self.nodes()
        return function(mu.unsqueeze(-1) + offsets) @ weights


@dataclass(frozen=True)
class GaussianKernel(Kernel):
    """X ~ N(0, scale^2)."""

    standard_deviation: float

    @property
    def entropy(self) -> float:
        """log(2 pi e scale^2) / 2."""
        return _HALF_LOG_TWO_PI_E + math.log(self.standard_deviation)

    @property
    def scale(self) -> float:
        """sigma."""
        return self.standard_deviation

    def moments(self, order: int) -> Tensor:
        """(n - 1)!! sigma^n for even n, else 0."""
        values = [1.0, 0.0]
        for n in range(2, order + 1):
            values.append((n - 1) * self.standard_deviation**2 * values[n - 2])
        return torch.tensor(values[: order + 1], dtype=torch.float64)

    def characteristic(self, frequency: Tensor) -> Tensor:
        """exp(-sigma^2 k^2 / 2)."""
        return torch.exp(-0.5 * (self.standard_deviation * frequency.double()).square()).to(torch.complex128)

    def nodes(self) -> tuple[Tensor, Tensor]:
        """Gauss-Hermite, 64 nodes."""
        points, weights = np.polynomial.hermite_e.hermegauss(64)
        return torch.from_numpy(points) * self.standard_deviation, torch.from_numpy(weights / weights.sum())


@dataclass(frozen=True, eq=False)
class DensityKernel(Kernel):
    """X of any density on [low, high]: `density` maps x (Q,) to beta_0(x) (Q,); beyond the interval it counts as 0.

    Everything is by composite Gauss-Legendre quadrature: jumps of the density belong at the ends of the interval.
    """

    density: Callable[[Tensor], Tensor]
    low: float
    high: float
    panels: int = 40
    _points: Tensor = field(init=False, repr=False)
    _weights: Tensor = field(init=False, repr=False)
    _entropy: float = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            raise ValueError(f"DensityKernel needs finite low < high. Got low={self.low}, high={self.high}.")
        edges = torch.linspace(self.low, self.high, self.panels + 1, dtype=torch.float64)
        nodes, weights = (torch.from_numpy(value) for value in np.polynomial.legendre.leggauss(16))
        half = 0.5 * edges.diff().unsqueeze(-1)  # (panels, 1)
        points = (edges[:-1].unsqueeze(-1) + half * (nodes + 1.0)).reshape(-1)  # (panels * 16,)
        values = self.density(points)
        if not bool((torch.isfinite(values) & (values >= 0.0)).all()):
            raise ValueError("DensityKernel.density must be finite and at least 0 on [low, high]. Give beta_0 itself.")
        masses = (half * weights).reshape(-1) * values
        total = float(masses.sum())
        if abs(total - 1.0) > 1e-4:
            raise ValueError(
                f"DensityKernel.density must integrate to 1 on [low, high]. Got {total:.6g} on [{self.low}, "
                f"{self.high}]. Widen the interval, or divide the density by its integral."
            )
        kept = masses > 0.0
        masses = masses[kept] / total
        object.__setattr__(self, "_points", points[kept])
        object.__setattr__(self, "_weights", masses)
        object.__setattr__(self, "_entropy", float(-(masses * (values[kept] / total).log()).sum()))

    @property
    def entropy(self) -> float:
        """By quadrature."""
        return self._entropy

    @property
    def scale(self) -> float:
        """By quadrature."""
        first, second = self.moments(2)[1:].tolist()
        return math.sqrt(second - first**2)

    def moments(self, order: int) -> Tensor:
        """By quadrature."""
        powers = torch.arange(order + 1, dtype=torch.float64)
        return (self._points.unsqueeze(-1) ** powers).mT @ self._weights

    def characteristic(self, frequency: Tensor) -> Tensor:
        """By quadrature."""
        phases = frequency.double().unsqueeze(-1) * self._points
        return torch.complex(phases.cos() @ self._weights, phases.sin() @ self._weights)

    def nodes(self) -> tuple[Tensor, Tensor]:
        """Gauss-Legendre on `panels` panels of 16 nodes."""
        return self._points, self._weights


@dataclass(frozen=True)
class MomentKernel(Kernel):
    """X known by E X^n, n = 0 ... len(values) - 1, and its entropy alone: enough for polynomials of that degree."""

    values: Sequence[float]
    known_entropy: float

    def __post_init__(self) -> None:
        if len(self.values) < 3 or self.values[0] != 1.0 or not all(math.isfinite(value) for value in self.values):
            raise ValueError(
                f"MomentKernel.values must be the finite moments 1, E X, E X^2, ... Got {list(self.values)}."
            )
        if self.values[2] <= self.values[1] ** 2:
            raise ValueError(
                f"MomentKernel.values must have E X^2 > (E X)^2. Got {self.values[2]} and {self.values[1] ** 2}."
            )

    @property
    def entropy(self) -> float:
        """As given."""
        return self.known_entropy

    @property
    def scale(self) -> float:
        """From the first two moments."""
        return math.sqrt(self.values[2] - self.values[1] ** 2)

    def moments(self, order: int) -> Tensor:
        """As given; an error where there are not so many."""
        if order >= len(self.values):
            raise ValueError(
                f"A polynomial of degree {order} needs E X^n up to n = {order}. Got moments up to "
                f"{len(self.values) - 1}. Give more moments, or the density."
            )
        return torch.tensor(list(self.values[: order + 1]), dtype=torch.float64)

    def characteristic(self, frequency: Tensor) -> Tensor:
        """Moments do not give it: an error."""
        raise ValueError(
            "Only a polynomial penalty can be inverted by moments. Give the density of the family for any other."
        )

    def nodes(self) -> tuple[Tensor, Tensor]:
        """They do not give these either: an error."""
        raise ValueError(
            "Only a polynomial penalty can be inverted by moments. Give the density of the family for any other."
        )
