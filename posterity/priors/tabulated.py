"""A prior given by a table of its log density, for densities without a name."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from posterity.errors import positive, shown
from posterity.numerics.random import Key
from posterity.optim.shrinkage import soft_threshold
from posterity.priors.independent import Independent, column

_DEPTH = 1e5  # nats below the mode where a table may end: posteriors reach much lower densities than draws
_FARTHEST = 20.0  # asinh of the farthest node, in widths, for tails that fall as a power
_FEWEST = 13
_FIRST = [-25.0, 48.0, -36.0, 16.0, -3.0]  # 12 times the finite-difference slope at the first of five values


class _Table(NamedTuple):
    """The interpolation in t = asinh(x / width), in float64 on one device."""

    pieces: Tensor  # (G - 1, 4), coefficients of 1, u, u^2, u^3 in each cell, normalised
    cumulated: Tensor  # (G,), the mass below each node


class _Sums(NamedTuple):
    """Integrals of exp(log_density), by quadrature in t and in closed form in the tails."""

    log_mass: float
    below: float  # the share of the mass below the first node
    above: float
    variance: float


@dataclass(frozen=True, eq=False)
class Tabulated(Independent):
    """Independent weights with a tabulated density.

    **Math**: w = mean + scale x. `log_density` (G,) is log p0(x) up to a constant at the nodes x = width sinh(t), for t
    equidistant between -`reach` and `reach`; between them it is a piecewise cubic in t with continuous slope, beyond
    them linear in t, which is a power of |x|. With `kink` the slope may jump at x = 0; where it falls there, the part
    of log p with a kink, by which `MAP(proximal=True)` steps, is -c |x| with c half the jump. The density is normalised
    here. `scale` is a number or (M,) with one for each member.

    **Limit**: the density is exact at the nodes up to its constant, and in error by the fourth power of their distance
    between them (1e-9 for a log density of curvature 1 and 2001 nodes). Features narrower than `width` and away from
    the mean are seen only as finely as the nodes lie there. Tails must fall faster than 1 / |x|. `cross_entropy` is by
    quadrature, to 1e-7. Not log-concave in general: `precision` may be negative.

    **Cost**: a table look-up for each weight; `cross_entropy` makes 401 of them, and its gradient as many again.

    **References**: none; `posterity.penalties.to_prior` returns it where a prior has no name.

    **Example**:

    >>> prior = Tabulated.of(lambda x: -0.25 * x**4)
    >>> prior.log_prob(torch.tensor([0.0, 1.0])) + 2.0 * math.log(math.gamma(0.25) / math.sqrt(2.0))
    tensor(-0.2500)
    >>> prior.variance(torch.zeros(1))
    tensor([0.6760])
    """

    log_density: Tensor
    reach: float
    width: float = 1.0
    mean: float = 0.0
    scale: float | Tensor = 1.0
    kink: bool = False

    quadrature_points = 401

    def __post_init__(self) -> None:
        super().__post_init__()
        positive("Tabulated.reach", self.reach)
        positive("Tabulated.width", self.width)
        values = self.log_density
        good = isinstance(values, Tensor) and values.dim() == 1 and len(values) >= _FEWEST and len(values) % 4 == 1
        if not good or not bool(torch.isfinite(values).all()):
            raise ValueError(
                f"Tabulated.log_density must be finite values (G,), at least {_FEWEST} and one more "
                f"than a multiple of 4. Got {shown(values)}."
            )
        first, last = self._end_slopes
        if not (first > 1.0 and last < -1.0):
            raise ValueError(
                "Tabulated.log_density must fall faster than -log|x| at both ends, or it does not integrate. "
                f"Got slopes {first:.3g} and {last:.3g} in log|x|. Give a longer reach, or add a confining term."
            )

    def __str__(self) -> str:
        return f"Tabulated({len(self.log_density)} nodes, width={self.width:.4g}, mean={self.mean:.4g})"

    @staticmethod
    def of(
        log_density: Callable[[Tensor], Tensor],
        width: float = 1.0,
        mean: float = 0.0,
        *,
        kink: bool = False,
        points: int = 2001,
    ) -> "Tabulated":
        """Tabulate a log density, a function of weights (G,) in float64 on the CPU.

        `width` is the distance over which it varies and `mean` its centre. A ValueError where it does not integrate.
        """
        positive("Tabulated.width", width)
        grid = torch.linspace(0.0, _FARTHEST, 401, dtype=torch.float64, device="cpu")
        sides = torch.stack([log_density(mean + sign * width * grid.sinh()) for sign in (-1.0, 1.0)])  # (2, 401)
        sides = torch.where(torch.isnan(sides), -math.inf, sides)
        shallow = (sides >= sides.max() - _DEPTH) * torch.arange(len(grid), device="cpu")
        ends = grid[(shallow.amax(1) + 1).clamp_max(len(grid) - 1)]  # (2,), where each side becomes deep enough
        reach = float(ends.max())
        # An oscillating density may have any slope at the last node: it must also fall over many e-folds of |x|.
        falls = (sides[:, -100:].mean(-1) - sides[:, -200:-100].mean(-1)) / float(grid[100])
        if bool(((falls > -1.0) & (shallow[:, -1] > 0)).any()):
            raise ValueError(
                "Tabulated.of: the log density must fall faster than -log|x| on both sides, or it does not integrate. "
                f"Got slopes {-float(falls[0]):.3g} and {float(falls[1]):.3g} in log|x|. Add a confining term."
            )
        nodes = torch.linspace(-1.0, 1.0, points, dtype=torch.float64, device="cpu") * reach
        values = log_density(mean + width * nodes.clamp(-float(ends[0]), float(ends[1])).sinh())
        values = (values - values.max()).clamp_min(-1e9)
        for end in ends.flip(0):  # the side that ends first continues as a power
            last = int((nodes <= end).nonzero()[-1])
            beyond = torch.arange(points - last, device="cpu")
            values[last:] = values[last] + beyond * (values[last] - values[last - 1])
            values = values.flip(0)
        return Tabulated(values, reach, width, mean, kink=kink)

    def standard_log_prob(self, x: Tensor) -> Tensor:
        cell, position, beyond = self._located(x)
        piece = self._table(x.device).pieces[cell]  # (..., 4)
        inside = piece[..., 0] + position * (piece[..., 1] + position * (piece[..., 2] + position * piece[..., 3]))
        return (inside + self._outer_slope(beyond) * beyond).to(x.dtype)

    @property
    def nonsmooth(self) -> bool:
        return self._kink_slopes[0] > 0.0

    def smooth_value_and_grad(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        value, grad = self.value_and_grad(theta)
        half_jump, middle = self._kink_slopes
        if half_jump <= 0.0:
            return value, grad
        away, scale = theta - self.mean, column(self, theta.shape, theta)
        return value, torch.where(away == 0, middle / scale, grad + half_jump / scale * away.sign())

    def proximal(self, theta: Tensor, step: float | Tensor) -> Tensor:
        """Move theta towards the mean by at most step c / scale."""
        half_jump, _ = self._kink_slopes
        if half_jump <= 0.0:
            return theta
        return soft_threshold(theta, step * half_jump / column(self, theta.shape, theta), self.mean)

    def standard_precision(self, x: Tensor) -> Tensor:
        """Apply the chain rule to the second derivative in t."""
        cell, position, beyond = self._located(x)
        piece = self._table(x.device).pieces[cell]
        within = beyond == 0.0
        slope = (piece[..., 1] + position * (2.0 * piece[..., 2] + position * 3.0 * piece[..., 3])) / self.spacing
        slope = torch.where(within, slope, self._outer_slope(beyond))
        bend = (2.0 * piece[..., 2] + 6.0 * position * piece[..., 3]) / self.spacing**2
        square = x.double().square() + self.width**2
        # With t = asinh(x / width): dt/dx = square^(-1/2) and d2t/dx2 = -x square^(-3/2).
        second = torch.where(within, bend, 0.0) / square - slope * x.double() / square**1.5
        return -second.to(x.dtype)

    def standard_sample(self, shape: tuple[int, ...], key: Key, device: torch.device) -> Tensor:
        """Invert the distribution function, taken as linear in t within each cell."""
        uniform = key.uniform(shape, torch.float64, device).clamp_min(2.0**-54)
        mass = self._table(device).cumulated
        cell = torch.searchsorted(mass, uniform, right=True).clamp(1, len(mass) - 1) - 1
        share = (uniform - mass[cell]) / (mass[cell + 1] - mass[cell]).clamp_min(1e-300)
        nodes = (cell + share.clamp(0.0, 1.0)) * self.spacing - self.reach
        first, last = self._end_slopes
        sums = self._sums
        below = -self.reach + (uniform / max(sums.below, 1e-300)).log() / (first - 1.0)
        above = self.reach - ((1.0 - uniform) / max(sums.above, 1e-300)).clamp_min(1e-300).log() / (-last - 1.0)
        nodes = torch.where(uniform < sums.below, below, torch.where(uniform > 1.0 - sums.above, above, nodes))
        return self.width * nodes.sinh()

    @property
    def standard_variance(self) -> float:
        """Variance of x by quadrature; inf where a tail falls no faster than |x|^-3."""
        return self._sums.variance

    @property
    def standard_width(self) -> float:
        return 0.0 if self.kink else self.width

    @property
    def log_mass(self) -> float:
        """Log of the integral of exp(log_density) over x."""
        return self._sums.log_mass

    @property
    def spacing(self) -> float:
        """Distance of neighbouring nodes in t."""
        return 2.0 * self.reach / (len(self.log_density) - 1)

    def _located(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the cell of each x, the position in it between 0 and 1, and the distance of t from the table."""
        t = torch.asinh(x.double() / self.width)
        inside = t.clamp(-self.reach, self.reach)
        steps = (inside + self.reach) / self.spacing
        cell = steps.detach().floor().long().clamp(0, len(self.log_density) - 2)
        return cell, steps - cell, t - inside

    def _outer_slope(self, beyond: Tensor) -> Tensor:
        """Return d log p0 / dt beyond the table, and 0 within, where it would only add rounding."""
        first, last = self._end_slopes
        return first * (beyond < 0.0) + last * (beyond > 0.0)

    @cached_property
    def _end_slopes(self) -> tuple[float, float]:
        """Slopes d log p0 / dt at the first and at the last node."""
        values = self.log_density.double().cpu()
        return _end_slope(values[:5]) / self.spacing, -_end_slope(values[-5:].flip(0)) / self.spacing

    @cached_property
    def _kink_slopes(self) -> tuple[float, float]:
        """Half of the jump of -d log p0 / dx at 0, and the mean of the slopes on both sides; zeros without a kink."""
        if not self.kink:
            return 0.0, 0.0
        values, centre = self.log_density.double().cpu(), len(self.log_density) // 2
        step = self.spacing * self.width  # dx at 0
        right = _end_slope(values[centre : centre + 5]) / step
        left = -_end_slope(values[centre - 4 : centre + 1].flip(0)) / step
        return 0.5 * (left - right), 0.5 * (left + right)

    @cached_property
    def _sums(self) -> _Sums:
        points, density, highest = self._measure()
        weights = torch.full_like(points, self.spacing)
        if self.kink:  # Simpson's rule on either side of it, where the trapezoid rule is only of second order
            weights *= 2.0 / 3.0
            weights[1::2] *= 2.0
        weights[[0, -1]] *= 0.5
        first, last = self._end_slopes
        # Beyond the last node the density is as x^slope, so that E x^k is a power's integral.
        tails = [
            [
                float(density[end]) * float(points[end]) ** k / (rate - 1.0 - k) if rate > 1.0 + k else math.inf
                for k in range(3)
            ]
            for end, rate in ((0, first), (-1, -last))
        ]
        moments = [float((weights * density * points**k).sum()) + tails[0][k] + tails[1][k] for k in range(3)]
        mass = moments[0]
        variance = moments[2] / mass - (moments[1] / mass) ** 2 if all(map(math.isfinite, moments)) else math.inf
        return _Sums(math.log(mass) + highest, tails[0][0] / mass, tails[1][0] / mass, variance)

    def _measure(self) -> tuple[Tensor, Tensor, float]:
        """Return x and the density times dx/dt at the nodes, both (G,), and the highest log density."""
        values = self.log_density.detach().double().cpu()
        nodes = torch.linspace(-self.reach, self.reach, len(values), dtype=torch.float64, device="cpu")
        highest = float(values.max())
        return self.width * nodes.sinh(), (values - highest).exp() * self.width * nodes.cosh(), highest

    @cached_property
    def _tables(self) -> dict[torch.device, _Table]:
        return {}

    def _table(self, device: torch.device) -> _Table:
        """Return the table on a device, made once and outside of any inference mode."""
        if device not in self._tables:
            with torch.inference_mode(False), torch.no_grad():
                values = self.log_density.detach().double().cpu() - self.log_mass
                middle = len(values) // 2
                segments = [values[: middle + 1], values[middle:]] if self.kink else [values]
                pieces = torch.cat([_hermite_pieces(segment) for segment in segments])
                _, density, highest = self._measure()
                density = density * math.exp(highest - self.log_mass)
                cells = 0.5 * self.spacing * (density[1:] + density[:-1])
                cumulated = torch.cat([cells.new_zeros(1), cells.cumsum(0)]) + self._sums.below
                table = _Table(pieces.to(device), cumulated.to(device))
            if any(type(part) is not Tensor for part in table):
                return table  # made under a trace, which it must not outlive
            self._tables[device] = table
        return self._tables[device]


def _end_slope(values: Tensor) -> float:
    """Return the slope at the first of five values at unit distance."""
    return float((torch.tensor(_FIRST, dtype=torch.float64, device="cpu") * values).sum()) / 12.0


def _hermite_pieces(values: Tensor) -> Tensor:
    """Return cubics through values at unit distance, with slopes by five-point stencils: (n,) -> (n - 1, 4)."""
    slopes = torch.empty_like(values)
    slopes[2:-2] = (values[:-4] - 8.0 * values[1:-3] + 8.0 * values[3:-1] - values[4:]) / 12.0
    for index, weights in enumerate((_FIRST, [-3.0, -10.0, 18.0, -6.0, 1.0])):
        stencil = torch.tensor(weights, dtype=torch.float64, device="cpu") / 12.0
        slopes[index] = (stencil * values[:5]).sum()
        slopes[-1 - index] = -(stencil * values[-5:].flip(0)).sum()
    step = values[1:] - values[:-1]
    left, right = slopes[:-1], slopes[1:]
    return torch.stack([values[:-1], left, 3.0 * step - 2.0 * left - right, left + right - 2.0 * step], dim=-1)
