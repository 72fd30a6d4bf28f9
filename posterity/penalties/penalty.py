"""The base class of penalties, and tabulated priors of penalties without a closed form."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor

from posterity.errors import positive, positive_whole, shown
from posterity.priors.prior import Prior
from posterity.priors.tabulated import Tabulated


def summable(weight: Tensor) -> Tensor:
    """Return weights in a dtype that can hold sums over them: float32 instead of half precision, else unchanged."""
    return weight.float() if weight.is_floating_point() and weight.element_size() < 4 else weight


class Penalty(ABC):
    """A penalty r of one weight tensor (out, in, *kernel), in nats, without its factor.

    A penalty is an immutable value. Penalised maximum likelihood with `factor` r(w) is the mode under `prior(factor)`:
    the reading of a penalty by a posterior without width. Other readings are made by `to_prior`, for which r is a
    function of the posterior's mean mu and scale nu (`of`, and for single weights `each`).
    """

    @abstractmethod
    def __call__(self, weight: Tensor) -> Tensor:
        """r(w), summed over the tensor: (out, in, *kernel) -> (), in float32 for half-precision weights."""

    @abstractmethod
    def prior(self, factor: float | Tensor = 1.0) -> Prior:
        """The prior exp(-factor r(w)) / Z, not bound; `factor` is a number or (M,) with one for each member."""

    @abstractmethod
    def factor(self, variance: float, shape: tuple[int, ...]) -> float:
        """The factor with which each weight of a tensor of `shape` has this variance under `prior(factor)`."""

    @property
    @abstractmethod
    def formula(self) -> str:
        """r in one line of plain text."""

    def of(self, mean: Tensor, scale: Tensor) -> Tensor:
        """r of a posterior with these means and scales, (out, in, *kernel) each -> (); by default r(mean)."""
        return self(mean)

    @property
    def separates(self) -> bool:
        """Whether r is a sum over single weights, whose terms `each` returns."""
        return True

    @abstractmethod
    def each(self, mean: Tensor, scale: Tensor) -> Tensor:
        """r of each weight alone, (...) and (...) -> (...); a TypeError where r is no such sum."""

    def __str__(self) -> str:
        return self.formula


_POINTS = (2001, 8001, 32001)  # of a table: the fewest for which every other node gives the same normaliser
_MASS = 1e-5
_SPANS = (30, 60, 700)  # asinh of the farthest grid point over 1e-9: 5e3; 6e16, then 5e294, if r has not risen by then
_FELT = 30.0  # nats above the lowest: wells less deep have no mass
_MOST_WELLS = 20
_LARGE = 1e100  # width beyond which squares of weights may be beyond all numbers
_DOUBLINGS = 60
_STEPS = 60
_SETTLED = 0.9  # of the variance at a factor e^2 times less


class NotIntegrable(ValueError):
    """exp(-r) has no finite integral."""


class MayIntegrate(NotIntegrable):
    """exp(-r) falls too slowly for a table, but may have a finite integral."""


class TooNarrow(ValueError):
    """exp(-r) has features that no table resolves."""


def checked_shape(shape: tuple[int, ...]) -> None:
    """Raise a ValueError unless `shape` is the shape of a weight tensor."""
    if not isinstance(shape, (tuple, list)) or not shape:
        raise ValueError(f"shape must be that of a weight tensor, (out, in, *kernel). Got {shown(shape)}.")
    for index, size in enumerate(shape):
        positive_whole(f"shape[{index}]", size)


def density_of(each: Callable[[Tensor], Tensor], factor: float | Tensor, name: str) -> Tabulated:
    """Tabulate the prior exp(-factor r(w)) / Z of single weights; `each` is r, (G,) -> (G,), `name` is for errors."""
    if isinstance(factor, Tensor) and factor.dim():
        raise ValueError(
            f"{name}: factor must be a number, because its prior has no closed form. Got {shown(factor)}. "
            "Make one prior for each member."
        )
    positive("factor", factor)
    exponent = float(factor)
    wells, widths = _wells(each, exponent)
    if not wells and bool(torch.isneginf(each(torch.zeros(1, dtype=torch.float64, device="cpu")))):
        raise ValueError(
            f"{name}: exp(-r) is infinite at 0, and no table has such a density. Use a penalty that is finite there."
        )
    if not wells:
        raise ValueError(
            f"{name}: r is infinite for every weight of no width, so by points it has no prior. Read it by a family "
            "with a width, such as Gaussian(0.5)."
        )
    centre, width = wells[0], widths[0]
    kink = _has_kink(each, centre, width)
    for points in _POINTS:
        try:
            table = _table(lambda w: -exponent * each(w), width, centre, kink, points)
        except ValueError as error:
            if _diverges(each, exponent):
                raise NotIntegrable(
                    f"{name}: exp(-r) does not integrate (kappa is infinite), so there is no prior. "
                    "Add a term that grows with |w|, such as SquaredL2."
                ) from error
            raise MayIntegrate(
                f"{name}: r grows so slowly that no table holds exp(-r), whose integral may be finite or not. "
                "Add a term that grows with |w|, such as SquaredL2."
            ) from error
        resolved = abs(replace(table, log_density=table.log_density[::2]).log_mass - table.log_mass) < _MASS
        # Nodes must lie as densely as wells away from the mean are narrow, or sums over them miss the wells.
        unit = float(table.scale)
        distances = [math.hypot(unit * table.width, well - table.mean) * table.spacing for well in wells]
        if resolved and all(distance <= reach for distance, reach in zip(distances, widths, strict=True)):
            return table
    raise TooNarrow(
        f"{name}: exp(-r) has features too narrow for a table of {_POINTS[-1]} nodes. Give a lower factor, or another "
        "r."
    )


def _table(log_density: Callable[[Tensor], Tensor], width: float, centre: float, kink: bool, points: int) -> Tabulated:
    """Tabulate a log density in units in which its variance is a number."""
    if 1.0 / _LARGE < width < _LARGE:
        return Tabulated.of(log_density, width, centre, kink=kink, points=points)
    table = Tabulated.of(lambda x: log_density(centre + width * x), kink=kink, points=points)
    return replace(table, mean=centre, scale=width)


def matched_factor(variance_of: Callable[[float], float], variance: float) -> float:
    """Solve `variance_of(factor)` = `variance` by bisection, for a variance that falls as the factor grows."""
    positive("variance", variance)
    low = high = 0.0  # logs of factors with a variance above and below the wanted one
    seen: list[float] = []
    for _ in range(_DOUBLINGS):
        try:
            seen.append(variance_of(math.exp(high)))
        except TooNarrow as error:
            text = f"No factor up to {math.exp(high):.3g} gives the variance {variance:g}. {error}"
            raise ValueError(_settled(seen, variance) or text) from error
        if seen[-1] <= variance:
            break
        high += 1.0
    for _ in range(_DOUBLINGS):
        if variance_of(math.exp(low)) >= variance:
            break
        low -= 1.0
    if not variance_of(math.exp(high)) <= variance <= variance_of(math.exp(low)):
        text = f"No factor gives the variance {variance:g}: the penalty hardly changes with the weight."
        raise ValueError(_settled(seen, variance) or text)
    for _ in range(_STEPS):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if variance_of(math.exp(middle)) > variance else (low, middle)
    return math.exp(0.5 * (low + high))


def _settled(seen: list[float], variance: float) -> str | None:
    """Explain why no factor reaches the variance if the variances `seen` have settled above it; else None."""
    if len(seen) < 3 or seen[-1] < _SETTLED * seen[-3] or seen[-1] <= variance:
        return None
    return (
        f"No factor gives the variance {variance:g}: as it grows, weights gather where r is lowest, which is at more "
        f"than one place, and their variance stays at {seen[-1]:.3g}. Give another r, with one lowest place."
    )


def _wells(each: Callable[[Tensor], Tensor], factor: float) -> tuple[list[float], list[float]]:
    """Return the minima of r, the lowest first (0 among equals), and the distance at which factor r has risen by 1/2.

    Local minima are kept if exp(-factor r) has mass there. Both lists are empty where r is +-infinite.
    """
    near, far, farthest = _SPANS
    grid, values = _on_grid(each, factor, near)
    if not _rises(values):
        grid, values = _on_grid(each, factor, far)
    if not _rises(values):
        with suppress(ValueError):  # r is not finite so far out
            whole, everywhere = _on_grid(each, factor, farthest)
            grid, values = (whole, everywhere) if _rises(everywhere) else (grid, values)
    lowest, index = values.min(0)
    centre = 0.0 if float(values[len(grid) // 2] - lowest) < 1e-3 else float(grid[index])
    centre = _lowest(each, centre)
    inner = values[1:-1]
    dips = ((inner < values[:-2]) & (inner <= values[2:])).nonzero().squeeze(-1) + 1
    dips = dips[values[dips].argsort()][:_MOST_WELLS]
    wells = grid.new_tensor([centre, *(_lowest(each, start) for start in grid[dips].tolist())])
    felt = wells[factor * (each(wells) - each(wells[:1])) < _FELT].tolist()
    widths = []
    for well in felt:
        around = well + grid
        risen = (factor * (each(around) - each(grid.new_tensor([well]))) > 0.5).nonzero().squeeze(-1)
        widths.append(float((around[risen] - well).abs().min()) if len(risen) else 1.0)
    return felt, widths


def _rises(values: Tensor) -> bool:
    """Whether r has risen by 1/2 at both ends of the grid."""
    return bool((values[[0, -1]] > values.min() + 0.5).all())


def _on_grid(each: Callable[[Tensor], Tensor], factor: float, span: int) -> tuple[Tensor, Tensor]:
    grid = torch.arange(-80 * span, 80 * span + 1, dtype=torch.float64, device="cpu").div(80.0).sinh() * 1e-9
    return grid, factor * each(grid)


_OUTERMOST = (700.0, 350.0, 80.0)  # logarithm of the largest |w|; less where r is not finite there
_CLEAR = 0.05  # of the range of a wave: so much its middle may rise
_SLOWEST = 1e-3  # slope in log|w| that is told from a power of |w| near 0


def _diverges(each: Callable[[Tensor], Tensor], factor: float) -> bool:
    """Whether exp(-factor r) certainly has an infinite integral, as far as values of r at all |w| of a double tell.

    The integral is that of exp(u - r) over u = log|w|. It diverges where r comes to rest, goes on falling or waving
    between the same bounds, or has a slope in u that is at most 1 and does not grow.
    """
    for sign in (-1.0, 1.0):
        u, values = _far_out(each, sign)
        values = factor * values
        known = int(torch.isfinite(values).cumprod(0).sum())
        if known < len(u) and (known < 400 or bool(values[known] == math.inf)):
            continue  # it has risen beyond all numbers
        values, last = values[:known], float(u[known - 1])
        half, quarter = known // 2, known - known // 4
        outer, steps = values[half:], values[half:].diff()
        if not bool((steps > 0).any()):  # at rest, or falling
            return True
        if bool((steps < 0).any()):
            before, after = values[half:quarter].median(), values[quarter:].median()
            if float(after - before) <= _CLEAR * float(outer.max() - outer.min()):
                return True
            continue
        inner = float(values[quarter] - values[half]) / float(u[quarter] - u[half])
        slope = float(values[-1] - values[quarter]) / (last - float(u[quarter]))
        rounding = 8.0 * torch.finfo(torch.float64).eps * float(values.abs().max()) / (last - float(u[quarter]))
        steady = abs(slope - inner) <= rounding
        if slope <= 1.0 + rounding and ((steady and slope >= _SLOWEST) or (inner - slope > rounding and inner < 1.0)):
            return True
    return False


def _far_out(each: Callable[[Tensor], Tensor], sign: float) -> tuple[Tensor, Tensor]:
    """r at weights of this sign, and the logarithms of their sizes, as far as r has values."""
    for outermost in _OUTERMOST:
        u = torch.linspace(0.0, outermost, 4001, dtype=torch.float64, device="cpu")
        with suppress(ValueError):
            return u, each(sign * u.exp())
    raise TooNarrow("r must be finite at weights of any size. Give a penalty that is.")


def _lowest(each: Callable[[Tensor], Tensor], point: float) -> float:
    """Refine the minimum of r near a grid point."""
    half = 0.02 * abs(point)  # a step of the grid there, and more
    while half > 1e-15 * abs(point):  # a kink must lie at the centre to be seen as one
        nearby = point + half * torch.linspace(-1.0, 1.0, 41, dtype=torch.float64, device="cpu")
        point = float(nearby[each(nearby).argmin()])
        half *= 0.06
    return point


def _has_kink(each: Callable[[Tensor], Tensor], centre: float, width: float) -> bool:
    """Whether the slope of r jumps at the centre, as the slope of |w| does at 0."""
    jumps = []
    for step in (1e-3 * width, 1e-4 * width):
        left, middle, right = each(
            torch.tensor([centre - step, centre, centre + step], dtype=torch.float64, device="cpu")
        ).tolist()
        jumps.append((right - 2.0 * middle + left) / step)
    return bool(abs(jumps[1]) > 0.5 * abs(jumps[0]) and abs(jumps[1]) * width > 1e-6)
