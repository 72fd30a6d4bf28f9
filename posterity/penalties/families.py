"""Variational families by which a penalty is read as a KL divergence."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
import torch
from torch import Tensor

from posterity.errors import positive, shown

_NODES = 16  # of a panel
_PANELS = 126
_MOST_PANELS = 700
_HALVINGS = 44  # of a panel: the mass of a kink or an integrable pole in it is then below rounding
_ROUNDING = 16.0  # times epsilon: panels that differ by so much agree
_MOST_MASS = 1 / 48  # of a panel: nodes lie close where the mass is, for what is integrated may have kinks, too
_WANTED = 1e-9  # of the integral


def panelled(density: Callable[[Tensor], Tensor], low: float, high: float) -> Tensor:
    """Edges (P + 1,) of panels on which the rule integrates `density` from `low` to `high`; one of them at 0, if there.

    A panel is halved where the integrals of p or of p log p over its halves do not add up to its own. A ValueError
    where that does not come to an end.

    >>> edges = panelled(lambda z: torch.exp(-(z - 0.3).abs()), -40.0, 40.0)
    >>> points, weights = panel_rule(edges)
    >>> round(float(weights @ torch.exp(-(points - 0.3).abs())), 12)
    2.0
    """
    edges = torch.linspace(low, high, _PANELS + 1, dtype=torch.float64, device="cpu")
    if low < 0.0 < high:
        edges = torch.cat([edges[edges.abs() > 1e-9 * (high - low)], edges.new_zeros(1)]).sort().values
    left, right = edges[:-1], edges[1:]
    settled: list[Tensor] = []  # left edges of panels that are done with
    doubt = total = 0.0
    halvings = 0
    while True:
        middle = 0.5 * (left + right)
        own, epsilon = _integrals(density, left, right)  # (2, P)
        halves = _integrals(density, torch.cat([left, middle]), torch.cat([middle, right]))[0]
        halves = halves.reshape(2, 2, -1).sum(1)
        total = total or float(halves[0].sum())  # all of it at first
        gap = (own - halves).abs()
        rough = (gap > _ROUNDING * epsilon * (halves.abs() + 1e-2 * total)).any(0)
        bad = rough | (halves[0] > _MOST_MASS * total)
        settled.append(left[~bad])
        doubt += float(gap[:, ~bad].amax(0).sum())
        many = sum(map(len, settled)) + 2 * int(bad.sum()) > _MOST_PANELS
        if many or halvings == _HALVINGS or not bool(bad.any()):
            break
        left, middle, right = left[bad], middle[bad], right[bad]
        left, right = torch.cat([left, middle]), torch.cat([middle, right])
        halvings += 1
    gap, left = gap[:, bad].amax(0), left[bad]
    doubt += float(gap.sum())
    if doubt > max(_WANTED, _PANELS * epsilon) * total:
        raise ValueError(
            "Translation.density must be smooth but for a few kinks, or its integrals are not known to nine digits. "
            f"Got one with integrals known to {doubt / total:.1g} between {low:g} and {high:g}, least near "
            f"{float(left[gap.argmax()]):.6g}. Give lowest and highest close around it, or standard_moments."
        )
    return torch.cat([*settled, left, edges[-1:]]).sort().values


def panel_rule(edges: Tensor) -> tuple[Tensor, Tensor]:
    """Nodes in all panels and their weights, (Q,) each."""
    points, weights = _legendre()
    half = 0.5 * edges.diff().unsqueeze(-1)
    return (edges[:-1].unsqueeze(-1) + half * (points + 1.0)).reshape(-1), (half * weights).reshape(-1)


def halved(edges: Tensor) -> Tensor:
    """The edges of twice as many panels."""
    return torch.cat([edges, 0.5 * (edges[:-1] + edges[1:])]).sort().values


def _integrals(density: Callable[[Tensor], Tensor], left: Tensor, right: Tensor) -> tuple[Tensor, float]:
    """Integrate p and p log p over each panel (2, P); also return the epsilon of the density's dtype."""
    points, weights = _legendre()
    half = 0.5 * (right - left).unsqueeze(-1)
    values = density((left.unsqueeze(-1) + half * (points + 1.0)).reshape(-1))
    both = torch.stack([values.double(), torch.xlogy(values.double(), values.double())]).reshape(2, len(left), -1)
    return (half * weights * both).sum(-1), torch.finfo(values.dtype).eps


@cache
def _legendre() -> tuple[Tensor, Tensor]:
    """Gauss-Legendre nodes between -1 and 1 and their weights, in float64 on the CPU."""
    points, weights = np.polynomial.legendre.leggauss(_NODES)
    return torch.from_numpy(points), torch.from_numpy(weights)


_POINTS = 2001
_REACH = 9.0  # standard deviations on either side of a normal: the mass beyond is 2e-19
_HALF_LOG_TWO_PI_E = 0.5 * math.log(2.0 * math.pi * math.e)
_LOOKED_AT = 4001  # points of a density, between which jumps are looked for
_JUMP = 8.0  # times the steps on either side: so far from node to node is no slope


class Family(ABC):
    """Densities beta_{mu, nu} of w = mu + X, where X has a density that nu (a scale) alone decides.

    `scales` are the values of nu in use: one where nu is fixed, several where it is trained.
    """

    @property
    @abstractmethod
    def scales(self) -> tuple[float, ...]:
        """The values of nu in use."""

    @property
    def is_fixed(self) -> bool:
        """Whether nu has one value only."""
        return len(self.scales) == 1

    @abstractmethod
    def entropy(self, scale: float) -> float:
        """-E log beta_nu(X) at nu = `scale`, in nats."""

    @abstractmethod
    def moments(self, scale: float, order: int) -> tuple[float, ...]:
        """E X^k for k = 0 ... `order`."""

    @abstractmethod
    def nodes(self, scale: float) -> tuple[Tensor, Tensor]:
        """Points x and weights that sum to 1, (Q,) each in float64 on the CPU, with E f(X) = sum of weights f(x)."""

    @property
    def knows_its_density(self) -> bool:
        """Whether `nodes` are available, not moments alone."""
        return True

    def finer_nodes(self, scale: float) -> tuple[Tensor, Tensor] | None:
        """Other, more nodes to check results of `nodes`; None where `nodes` are as exact as moments."""
        return None

    @property
    def is_continuous(self) -> bool:
        """Whether the density has no jumps: then averages over it have no kinks."""
        return True

    def characteristic(self, frequency: Tensor, scale: float) -> Tensor:
        """E exp(i k X) at each frequency k, complex: (...) -> (...)."""
        points, weights = (part.to(frequency.device) for part in self.nodes(scale))
        phase = frequency.double().unsqueeze(-1) * points
        return torch.complex((phase.cos() * weights).sum(-1), (phase.sin() * weights).sum(-1))


@dataclass(frozen=True)
class Dirac(Family):
    """A point without width: w = mu. The reading of a penalty by maximum a posteriori.

    **Math**: KL(beta_mu || alpha) = -log alpha(mu) + an infinite constant, which is left out: a penalty r has the
    prior exp(-r) / Z.

    **Limit**: says nothing about how far from the mode the posterior reaches.

    **Cost**: none.

    **References**: MacKay (1992), A practical Bayesian framework for backpropagation networks.

    **Example**:

    >>> Dirac().scales, Dirac().moments(0.0, 2)
    ((0.0,), (1.0, 0.0, 0.0))
    """

    @property
    def scales(self) -> tuple[float, ...]:
        return (0.0,)

    def entropy(self, scale: float) -> float:
        """0 by convention: the part of the KL that does not depend on mu, which is infinite, is left out."""
        return 0.0

    def moments(self, scale: float, order: int) -> tuple[float, ...]:
        return (1.0, *(0.0,) * order)

    def nodes(self, scale: float) -> tuple[Tensor, Tensor]:
        return torch.zeros(1, dtype=torch.float64, device="cpu"), torch.ones(1, dtype=torch.float64, device="cpu")

    def __str__(self) -> str:
        return "points"


@dataclass(frozen=True)
class Gaussian(Family):
    """N(mu, sigma^2); `scale` is sigma where it is fixed, or several sigmas where it is trained.

    **Math**: KL(N(mu, sigma^2) || alpha) = -log(2 pi e sigma^2) / 2 - (N(0, sigma^2) * log alpha)(mu): but for
    constants the penalty is -log alpha smoothed, which inversion undoes.

    **Limit**: with one sigma only the means are penalised, and smooth penalties have a prior; with several, one prior
    must explain the penalty at all of them.

    **Cost**: closed forms, or about 2,000 nodes for each mean.

    **References**: Wolinski, Charpiat and Ollivier (2020), An equivalence between Bayesian priors and penalties in
    variational inference.

    **Example**:

    >>> Gaussian(0.5).is_fixed, Gaussian((0.2, 0.5, 1.0)).is_fixed, Gaussian(2.0).moments(2.0, 4)
    (True, False, (1.0, 0.0, 4.0, 0.0, 48.0))
    """

    scale: float | tuple[float, ...] = (0.2, 0.5, 1.0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "scale", _checked_scales("Gaussian.scale", self.scale))

    @property
    def scales(self) -> tuple[float, ...]:
        return self.scale if isinstance(self.scale, tuple) else (self.scale,)

    def entropy(self, scale: float) -> float:
        return _HALF_LOG_TWO_PI_E + math.log(scale)

    def moments(self, scale: float, order: int) -> tuple[float, ...]:
        moments = [1.0, 0.0]
        for k in range(2, order + 1):
            moments.append((k - 1) * scale**2 * moments[k - 2])
        return tuple(moments[: order + 1])

    def nodes(self, scale: float) -> tuple[Tensor, Tensor]:
        points = torch.linspace(-_REACH, _REACH, _POINTS, dtype=torch.float64, device="cpu")
        weights = torch.exp(-0.5 * points.square())
        return scale * points, weights / weights.sum()

    def characteristic(self, frequency: Tensor, scale: float) -> Tensor:
        value = torch.exp(-0.5 * (scale * frequency.double()).square())
        return torch.complex(value, torch.zeros_like(value))

    def __str__(self) -> str:
        if self.is_fixed:
            return f"Gaussians of fixed scale {self.scales[0]:g}"
        return "Gaussians of any scale"


@dataclass(frozen=True)
class Translation(Family):
    """w = mu + nu Z with Z of any density, given as a function or by its moments.

    `density` takes points (Q,) in float64 on the CPU and gives the density there (Q,), up to its normaliser; it is
    read between `lowest` and `highest`, beyond which it must be negligible or zero: where it has an edge, one of the
    two must be there. Or `standard_moments` are E Z^k for k = 0, 1, ..., and `standard_entropy` is -E log of Z's
    density; polynomial penalties up to that order need no more. `scale` is nu where it is fixed, or several where it is
    trained.

    **Math**: KL(beta_{mu, nu} || alpha) = -H(Z) - log nu - E log alpha(mu + nu Z), by sums over nodes; a polynomial
    penalty is inverted by the moments alone.

    **Limit**: where the characteristic function of Z has zeros, as for a uniform density, waves of these lengths
    leave no trace in the KL, and their part of the prior is not found. A density has no mass beyond `lowest` and
    `highest`, no jumps between them, and integrals that are known to nine digits; others are refused.

    **Cost**: 2,000 to 4,000 nodes for each mean, at most 11,200 where there are many kinks.

    **References**: Wolinski, Charpiat and Ollivier (2020), An equivalence between Bayesian priors and penalties in
    variational inference.

    **Example**:

    >>> triangle = Translation(lambda z: (1.0 - z.abs()).clamp_min(0.0), lowest=-1.0, highest=1.0)
    >>> round(triangle.moments(1.0, 2)[2], 4), round(triangle.entropy(1.0), 4)
    (0.1667, 0.5)
    >>> Translation(standard_moments=(1.0, 0.0, 1.0), standard_entropy=1.4).moments(2.0, 2)
    (1.0, 0.0, 4.0)
    """

    density: Callable[[Tensor], Tensor] | None = None
    lowest: float = -40.0
    highest: float = 40.0
    standard_moments: tuple[float, ...] | None = None
    standard_entropy: float | None = None
    scale: float | tuple[float, ...] = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "scale", _checked_scales("Translation.scale", self.scale))
        if (self.density is None) == (self.standard_moments is None):
            raise ValueError("Translation must be given by density or by standard_moments. Give one of the two.")
        if not self.lowest < self.highest:
            raise ValueError(
                f"Translation.lowest must be below Translation.highest. Got {self.lowest} and {self.highest}."
            )
        moments = self.standard_moments
        if moments is None:
            self._rule  # noqa: B018  # a function that is no density is refused now, not when it is used
            return
        if (
            not (isinstance(moments, (tuple, list)) and len(moments) >= 3 and moments[0] == 1.0)
            or not all(map(math.isfinite, moments))
            or moments[2] <= moments[1] ** 2
        ):
            raise ValueError(
                "Translation.standard_moments must be (1, E Z, E Z^2, ...), finite and with a positive variance. "
                f"Got {shown(moments)}."
            )
        if self.standard_entropy is None or not math.isfinite(self.standard_entropy):
            raise ValueError(
                "Translation.standard_entropy must be a number where the density is given by its moments. "
                f"Got {shown(self.standard_entropy)}."
            )
        object.__setattr__(self, "standard_moments", tuple(map(float, moments)))

    @property
    def scales(self) -> tuple[float, ...]:
        return self.scale if isinstance(self.scale, tuple) else (self.scale,)

    @property
    def is_continuous(self) -> bool:
        """Whether the density ends near 0 on both sides; of moments nothing else is known."""
        if self.density is None:
            return True
        values = self._checked_values
        return float(values[[0, -1]].max()) <= 1e-3 * float(values.max())

    @property
    def knows_its_density(self) -> bool:
        return self.density is not None

    @cached_property
    def _checked_values(self) -> Tensor:
        """The density, up to its normaliser, at equidistant points from `lowest` to `highest` (Q,)."""
        assert self.density is not None
        points = torch.linspace(self.lowest, self.highest, _LOOKED_AT, dtype=torch.float64, device="cpu")
        inset = 1e-12 * (self.highest - self.lowest)  # the density at an edge is that within, whatever < and <= say
        points[0], points[-1] = points[0] + inset, points[-1] - inset
        values = self.density(points)
        good = isinstance(values, Tensor) and values.shape == points.shape and not values.is_complex()
        if not good or not bool(torch.isfinite(values).all() & (values >= 0.0).all()) or float(values.sum()) <= 0.0:
            raise ValueError(
                "Translation.density must give a density, finite and at least 0, for each of the points (Q,). "
                f"Got {shown(values)}."
            )
        values = values.double()
        steps = values.diff().abs()
        beside = torch.nn.functional.pad(steps, (1, 1))
        jumps = (steps > _JUMP * torch.maximum(beside[:-2], beside[2:])) & (steps > 1e-3 * values.max())
        if bool(jumps.any()):
            index = int(jumps.nonzero()[0])
            raise ValueError(
                f"Translation.density must not jump between lowest and highest. It does between {points[index]:.6g} "
                f"and {points[index + 1]:.6g}. Let lowest or highest be where it does, or give standard_moments."
            )
        return values

    def _read(self, points: Tensor) -> Tensor:
        """The density, up to its normaliser, in a floating-point dtype."""
        assert self.density is not None
        values = self.density(points)
        return values if values.is_floating_point() else values.double()

    @cached_property
    def _edges(self) -> Tensor:
        """Edges of the panels of the rule."""
        self._checked_values  # noqa: B018  # a density that is none is refused first
        return panelled(self._read, self.lowest, self.highest)

    @cached_property
    def _rule(self) -> tuple[Tensor, Tensor, Tensor]:
        """Points z, weights that sum to 1, and the density, (Q,) each."""
        return self._rule_on(self._edges)

    @cached_property
    def _finer_rule(self) -> tuple[Tensor, Tensor, Tensor]:
        """`_rule` with other nodes, twice as many."""
        return self._rule_on(halved(self._edges))

    def _rule_on(self, edges: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        points, rule = panel_rule(edges)
        values = self._read(points).double()
        mass = float((rule * values).sum())
        return points, rule * values / mass, values / mass

    def entropy(self, scale: float) -> float:
        if self.standard_entropy is not None:
            return self.standard_entropy + math.log(scale)
        _, weights, values = self._rule
        return float(-torch.xlogy(weights, values).sum()) + math.log(scale)

    def moments(self, scale: float, order: int) -> tuple[float, ...]:
        if self.standard_moments is not None:
            if order >= len(self.standard_moments):
                raise ValueError(
                    f"Translation.standard_moments must go up to order {order} for this penalty. "
                    f"Got {len(self.standard_moments) - 1}. Give more of them, or the density."
                )
            return tuple(scale**k * value for k, value in enumerate(self.standard_moments[: order + 1]))
        points, weights, _ = self._rule
        return tuple(scale**k * float((weights * points**k).sum()) for k in range(order + 1))

    def nodes(self, scale: float) -> tuple[Tensor, Tensor]:
        """Gauss-Legendre's on panels between `lowest` and `highest`, narrow where the density has kinks; times nu."""
        if self.density is None:
            raise ValueError(
                "Translation: this penalty is no polynomial, so moments do not decide. Give Translation its density."
            )
        points, weights, _ = self._rule
        return scale * points, weights

    def finer_nodes(self, scale: float) -> tuple[Tensor, Tensor] | None:
        if self.density is None:
            return None
        points, weights, _ = self._finer_rule
        return scale * points, weights

    def __str__(self) -> str:
        return f"translates of {'one density' if self.is_fixed else 'a density of any scale'}"


def _checked_scales(name: str, scale: object) -> float | tuple[float, ...]:
    """One positive number, or several that differ."""
    if not isinstance(scale, (tuple, list)):
        positive(name, scale, "or a tuple of such numbers")
        return float(scale)  # type: ignore[arg-type]
    for index, value in enumerate(scale):
        positive(f"{name}[{index}]", value)
    if not scale or len(set(scale)) < len(scale):
        raise ValueError(f"{name} must be a positive number, or several that differ. Got {shown(scale)}.")
    values = [float(value) for value in scale]
    return tuple(values) if len(values) > 1 else values[0]
