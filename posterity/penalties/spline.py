"""Forward fits of log alpha by splines, whose smoothing comes closest to the penalty (theory 002-13)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from posterity.penalties.expansion import Member

_NEGLIGIBLE = 1e-16  # of the largest weight: nodes below change no digit
_BUDGET = 2**18  # points at which B-splines are evaluated at once
_FEWEST, _MOST = 120, 400  # pieces of the spline


@dataclass(frozen=True, eq=False)
class Spline:
    """A cubic spline with equidistant knots from `low`, `step` apart; coefficients of its B-splines (pieces + 3,).

    Beyond its knots it goes on as its second-order Taylor polynomial, without the curvature where that is upward.
    """

    low: float
    step: float
    coefficients: Tensor

    def __call__(self, t: Tensor) -> Tensor:
        """g(t), (...) -> (...) with the dtype and device of t."""
        points = t.to(self.coefficients)
        inside = points.clamp(self.low, self.low + self.step * (len(self.coefficients) - 3))
        beyond = points - inside
        if not bool(beyond.any()):
            return self._derivative(points, 0).to(t)
        value, slope, curvature = (self._derivative(inside, order) for order in range(3))
        return (value + slope * beyond + 0.5 * curvature.clamp_max(0.0) * beyond.square()).to(t)

    def _derivative(self, t: Tensor, order: int) -> Tensor:
        index, local = _located(t, self.low, self.step, len(self.coefficients) - 3)
        shares = _basis(local, order) / self.step**order  # (..., 4)
        return (shares * self.coefficients[index.unsqueeze(-1) + torch.arange(4, device="cpu")]).sum(-1)


def _located(t: Tensor, low: float, step: float, pieces: int) -> tuple[Tensor, Tensor]:
    """Return the piece that contains t, and the position of t in it, from 0 to 1."""
    position = (t - low) / step
    index = position.floor().clamp(0, pieces - 1)
    return index.long(), position - index


def _basis(u: Tensor, order: int) -> Tensor:
    """The four cubic B-splines that are not zero on a piece, or their derivatives in u: (...) -> (..., 4)."""
    v = 1.0 - u
    if order == 0:
        parts = (v**3, 3.0 * u**3 - 6.0 * u**2 + 4.0, 3.0 * v**3 - 6.0 * v**2 + 4.0, u**3)
        return torch.stack(parts, dim=-1) / 6.0
    if order == 1:
        return torch.stack((-(v**2), 3.0 * u**2 - 4.0 * u, 4.0 * v - 3.0 * v**2, u**2), dim=-1) / 2.0
    return torch.stack((v, 3.0 * u - 2.0, 3.0 * v - 2.0, u), dim=-1)


@dataclass(frozen=True, eq=False)
class ForwardFit:
    """Splines g whose smoothing by every member comes close to given values at mu (N,), equidistant.

    `matrix` has E B_j(mu_i + X_v) for the B-splines j, (V N, pieces + 3); lengths are in units of `unit`, the least
    standard deviation of the members. `blind` is what the families leave of waves too fast for the knots: a kink of
    log alpha is missed by about so much, next to nothing for Gaussians. `check` is `matrix` by nodes finer than those
    of the fit, where members have them.
    """

    low: float
    step: float
    unit: float
    spacing: float
    blind: float
    matrix: Tensor
    check: Tensor

    def solve(self, targets: Tensor, smoothness: float) -> Tensor:
        """Coefficients (pieces + 3, C) for targets (V N, C), each column by itself.

        They minimise the sum over v of the integral of |E g(mu + X_v) - target_v|^2 over mu, plus `smoothness` times
        the integral of |g'''|^2.
        """
        share = math.sqrt(self.spacing / self.unit)
        count = self.matrix.shape[1]
        rough = torch.eye(count, dtype=torch.float64, device="cpu").diff(n=3, dim=0)
        rough = rough * math.sqrt(smoothness * (self.unit / self.step) ** 5)
        orthogonal, triangular = torch.linalg.qr(torch.cat([self.matrix * share, rough]))
        right = torch.cat([targets * share, targets.new_zeros(count - 3, targets.shape[1])])
        solution: Tensor = torch.linalg.solve_triangular(triangular, orthogonal.mT @ right, upper=True)
        return solution

    def spline(self, coefficients: Tensor) -> Spline:
        """The spline with these coefficients (pieces + 3,)."""
        return Spline(self.low, self.step, coefficients)


def forward_fit(mu: Tensor, members: Sequence[Member], *, between: bool = False) -> ForwardFit:
    """Prepare the fit of one spline for all members, with knots as far out as any member reaches from the grid.

    `between` shifts the knots by half a step.
    """
    unit = min(member.spread for member in members)
    rules: list[tuple[Tensor, Tensor]] = []
    for points, weights in (member.nodes() for member in members):
        kept = weights > _NEGLIGIBLE * weights.max()
        rules.append((points[kept], weights[kept] / weights[kept].sum()))
    low = float(mu.min()) + min(float(points.min()) for points, _ in rules)
    high = float(mu.max()) + max(float(points.max()) for points, _ in rules)
    spacing = float(mu[1] - mu[0])
    pieces = min(max(math.ceil(3.0 * (high - low) / unit), _FEWEST), _MOST)
    step = (high - low) / pieces
    if between:
        low, pieces = low - 0.5 * step, pieces + 1
    own = [_smoothing(mu, *rule, low, step, pieces) for rule in rules]
    finer = [member.finer_nodes() for member in members]
    check = [
        matrix if rule is None else _smoothing(mu, *rule, low, step, pieces)
        for matrix, rule in zip(own, finer, strict=True)
    ]
    frequency = 0.85 * math.pi / step  # cubics lag before Nyquist's frequency
    fast = frequency * torch.linspace(1.0, 2.0 / 0.85, 65, dtype=torch.float64, device="cpu")
    blind = max(float(member.characteristic(fast).abs().max()) for member in members)
    return ForwardFit(low, step, unit, spacing, blind, torch.cat(own), torch.cat(check))


def _smoothing(mu: Tensor, points: Tensor, weights: Tensor, low: float, step: float, pieces: int) -> Tensor:
    """E B_j(mu_i + X) for each B-spline j, (N, pieces + 3)."""
    count = pieces + 3
    matrix = torch.zeros(len(mu), count, dtype=torch.float64, device="cpu")
    for part, rows in zip(*(torch.split(value, max(1, _BUDGET // len(points))) for value in (mu, matrix)), strict=True):
        index, local = _located(part.unsqueeze(-1) + points, low, step, pieces)  # (n, Q)
        shares = _basis(local, 0) * weights.unsqueeze(-1)  # (n, Q, 4)
        own = count * torch.arange(len(part), device="cpu").reshape(-1, 1, 1)  # index of the first entry of each row
        where = index.unsqueeze(-1) + torch.arange(4, device="cpu") + own
        rows.view(-1).index_add_(0, where.reshape(-1), shares.reshape(-1))
    return matrix


def interpolate(t: Tensor, values: Tensor) -> Spline:
    """The spline through values (N,) at equidistant t (N,), with the third derivative 0 at both ends."""
    count, step = len(t), float(t[1] - t[0])
    matrix = torch.zeros(count + 2, count + 2, dtype=torch.float64, device="cpu")
    rows = torch.arange(count, device="cpu")
    for offset, share in enumerate((1.0 / 6.0, 4.0 / 6.0, 1.0 / 6.0)):
        matrix[rows + 1, rows + offset] = share
    ends = torch.tensor([-1.0, 3.0, -3.0, 1.0], dtype=torch.float64, device="cpu")
    matrix[0, :4], matrix[-1, -4:] = ends, ends
    right = torch.cat([values.new_zeros(1), values, values.new_zeros(1)]).double()
    return Spline(float(t[0]), step, torch.linalg.solve(matrix, right))
