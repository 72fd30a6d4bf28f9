"""Stacking: weights of a mixture of predictives that maximise its held-out log density."""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from posterity.errors import BadData, fraction, shown

logger = logging.getLogger("posterity")

TOLERANCE = 1e-8
"""Largest gap between the log density (nats per row) of the result and its upper bound."""

_STEPS = 200  # of the interior-point method, at most; some 12 are usual
_SLACK = 1e-6  # of the least squared error: the interior-point method needs room inside the guard


@dataclass(frozen=True, eq=False)
class Stacking:
    """Weights of a stacked mixture, and its scores on the held-out rows.

    - `weights` (K,) sum to 1; components of weight 0 may be left out.
    - `log_density` of the mixture, and `single` (K,) of each component, are held-out means in nats per row.
    - `gap` bounds how far the log density, with pseudo-rows, lies below the largest that any weights allow
      (under the guard, if one was asked for), before small weights were dropped.
    - `squared_error` of the mixture's mean and the `limit` of the guard, in units of the targets' variance; None
      without a guard.
    """

    weights: Tensor
    log_density: float
    single: Tensor
    gap: float
    squared_error: float | None = None
    limit: float | None = None


class _Guard(NamedTuple):
    """The mean's squared error in units of its `limit`, w^T `products` w, which must not exceed 1."""

    products: Tensor
    limit: float


def stacked(
    log_densities: Tensor,
    *,
    row_weights: Tensor | None = None,
    means: Tensor | None = None,
    targets: Tensor | None = None,
    standard_errors: float = 1.0,
    pseudo_rows: float = 0.0,
    least: float = 0.01,
) -> Stacking:
    """Stack predictives: find the weights of largest held-out log density of their mixture.

    Takes the log density of each held-out row under each component, (N, K), by fits that have not seen the row, and
    weights of the rows (N,). With `means` (N, K, *event) of the components and `targets` (N, *event) the mean is
    guarded. Each component is given `pseudo_rows` rows that it alone explains, which keeps its weight above 0. Weights
    below `least` are dropped and the others divided by their sum, one at a time, wherever this costs less than `least`
    nats per row and keeps the guard.

    **Math**: maximise sum_n r_n log sum_k w_k p_k(y_n) over the simplex, r the row weights over their sum: concave.
    `pseudo_rows` a add (a / N) sum_k log w_k for N rows: the weights of largest posterior density under a Dirichlet
    prior, Dir(1 + a), which are near equal for few rows. The guard asks that the mixture's mean has a squared error,
    sum_n r_n |y_n - sum_k w_k mean_nk|^2 = w^T A w with A_jk = sum_n r_n (y_n - mean_nj) . (y_n - mean_nk), of at most
    the least of one component plus `standard_errors` of its standard errors: a convex constraint. Outputs count in
    units of their variance. A primal-dual interior-point method runs until a dual bound proves a gap below 1e-8 nats:
    for the multiplier l of the guard and the gradient g of log density - l w^T A w, the optimum is at most max_k g_k -
    w . g + l (limit - w^T A w) above.

    **Limit**: exact for the rows given; on few rows the weights fit their noise, less so with pseudo-rows. Of equal
    components each has the same weight. The limit of the guard has a relative slack of 1e-6.

    **Cost**: some 12 passes of O(N K^2).

    **References**: Yao, Vehtari, Simpson and Gelman (2018), Using stacking to average Bayesian predictive
    distributions; Breiman (1996), Stacked regressions, for squared errors; Boyd and Vandenberghe (2004), Convex
    optimization, section 11.7; Mehrotra (1992), On the implementation of a primal-dual interior point method.

    >>> log_densities = torch.tensor([[0.0, -3.0, -9.0]] * 3 + [[-3.0, 0.0, -9.0]])
    >>> stacked(log_densities).weights.round(decimals=3)  # (3 - e^-3) / 4 over 1 - e^-3, ...
    tensor([0.7760, 0.2240, 0.0000], dtype=torch.float64)
    """
    fraction("stacked: least", least)
    if isinstance(pseudo_rows, bool) or not 0.0 <= pseudo_rows < math.inf:
        raise ValueError(f"stacked: pseudo_rows must be a number from 0 up. Got {shown(pseudo_rows)}.")
    values, shares = _checked(log_densities, row_weights)
    guard = None if means is None and targets is None else _guard(means, targets, shares, values, standard_errors)
    values, shares = values[shares > 0], shares[shares > 0]
    largest = values.amax(1, keepdim=True)
    densities = (values - largest).exp()  # (N, K), the largest of each row is 1
    offset = float(shares @ largest[:, 0])
    weights, gap = _solved(*_with_pseudo_rows(densities, shares, pseudo_rows), guard)
    weights = _dropped(weights, densities, shares, guard, least)
    return Stacking(
        weights,
        float(shares @ (densities @ weights).log()) + offset,
        shares @ values,
        gap,
        None if guard is None else guard.limit * (1.0 - _room(guard, weights)),
        None if guard is None else guard.limit,
    )


def _with_pseudo_rows(densities: Tensor, shares: Tensor, count: float) -> tuple[Tensor, Tensor]:
    """Add a pseudo-row for each component, which it alone explains, with the weight `count`; the shares sum to 1."""
    rows, components = densities.shape
    if not count:
        return densities, shares
    more = torch.full((components,), count, dtype=torch.float64, device="cpu")
    own = torch.eye(components, dtype=torch.float64, device="cpu")
    return torch.cat([densities, own]), torch.cat([rows * shares, more]) / (rows + components * count)


def _checked(log_densities: Tensor, row_weights: Tensor | None) -> tuple[Tensor, Tensor]:
    """Log densities (N, K) and shares of the rows (N,) in float64."""
    values = torch.as_tensor(log_densities).detach().to("cpu", torch.float64)
    if values.dim() != 2 or not values.numel():
        raise BadData(f"stacked: log_densities must be (N, K), rows by components. Got {tuple(values.shape)}.")
    if row_weights is None:
        shares = torch.full((len(values),), 1.0 / len(values), dtype=torch.float64, device="cpu")
    else:
        shares = torch.as_tensor(row_weights).detach().to("cpu", torch.float64)
        good = shares.shape == (len(values),) and bool((shares >= 0).all() and shares.isfinite().all())
        if not good or not float(shares.sum()) > 0:
            raise BadData(
                f"stacked: row_weights must be {len(values)} numbers from 0 up, not all 0. Got {shown(row_weights)}."
            )
        shares = shares / shares.sum()
    if bool((values.isnan() | (values == math.inf)).any()):
        raise BadData("stacked: log_densities must not be NaN or infinite. Leave out the component that failed.")
    lost = (values == -math.inf).all(1) & (shares > 0)
    if bool(lost.any()):
        row = int(lost.nonzero()[0, 0])
        raise BadData(f"stacked: row {row} has density 0 under every component. Add one with wider tails.")
    return values, shares


def _guard(
    means: Tensor | None, targets: Tensor | None, shares: Tensor, values: Tensor, standard_errors: float
) -> _Guard:
    """Products of the components' errors, and the limit of the mixture's."""
    count, components = values.shape
    if means is None or targets is None:
        raise ValueError("stacked: the guard needs both means and targets. Give both, or neither.")
    if isinstance(standard_errors, bool) or not 0.0 <= standard_errors < math.inf:
        raise ValueError(f"stacked: standard_errors must be a number from 0 up. Got {shown(standard_errors)}.")
    y = torch.as_tensor(targets).detach().to("cpu", torch.float64).reshape(count, -1)
    given = torch.as_tensor(means).detach().to("cpu", torch.float64)
    if given.shape[:2] != (count, components) or given.numel() != components * y.numel():
        raise BadData(
            f"stacked: means must be (N, K, *event) for {count} rows of {components} components and targets "
            f"{tuple(torch.as_tensor(targets).shape)}. Got {tuple(given.shape)}."
        )
    variance = shares @ (y - shares @ y).square()
    away = (y.unsqueeze(1) - given.reshape(count, components, -1)) / variance.where(variance > 0, 1.0).sqrt()
    if not bool(away.isfinite().all()):
        raise BadData("stacked: means and targets must be finite. Leave out the component that failed.")
    away = away / math.sqrt(max(1, away.shape[2]))
    products = torch.einsum("n,njd,nkd->jk", shares, away, away)
    errors = away.square().sum(2)  # (N, K)
    best = int(products.diagonal().argmin())
    mean = float(products[best, best])
    error = float((shares.square() @ (errors[:, best] - mean).square()).sqrt())
    limit = mean * (1.0 + _SLACK) + 1e-12 + standard_errors * error
    return _Guard(products / limit, limit)


def _solved(densities: Tensor, shares: Tensor, guard: _Guard | None) -> tuple[Tensor, float]:
    """The weights of largest log density, and the proved gap, by a primal-dual interior-point method.

    Weights w have multipliers z; the guard w^T A w + slack = 1, in units of the limit, has the multiplier l. A step
    solves the linearised conditions of optimality with all products w z and l slack equal to a target, which a step
    towards 0 chooses (Mehrotra, 1992).
    """
    point = _start(densities.shape[1], guard)
    state = _State.at(point, densities, shares, guard)
    for _ in range(_STEPS):
        if state.gap <= TOLERANCE and abs(state.miss) <= TOLERANCE:
            return point.weights, state.gap
        towards = _newton(point, state, densities, shares, guard)
        product = point.product
        ahead = towards(0.0)
        later = point.moved(ahead, min(1.0, point.largest(ahead))).product
        step = towards(product * min(0.8, max(1e-3, later / product) ** 3))
        point = point.moved(step, min(1.0, 0.99 * point.largest(step)))
        state = _State.at(point, densities, shares, guard)
    logger.warning("stacking ended within %.1e nats of the best weights, not %.0e", state.gap, TOLERANCE)
    return point.weights, state.gap


class _Point(NamedTuple):
    """Weights (K,), their multipliers (K,), the slack of the guard and its multiplier; all above 0.

    Without a guard the slack is 1 and its multiplier is 0.
    """

    weights: Tensor
    duals: Tensor
    slack: float
    multiplier: float

    def moved(self, step: "_Point", size: float) -> "_Point":
        """The point after a part of the step, on the simplex."""
        weights, duals = self.weights + size * step.weights, self.duals + size * step.duals
        slack, multiplier = self.slack + size * step.slack, self.multiplier + size * step.multiplier
        return _Point(weights / weights.sum(), duals, slack, multiplier)

    @property
    def product(self) -> float:
        """The mean product of the non-negative unknowns and their multipliers."""
        total = float(self.weights @ self.duals) + self.multiplier * self.slack
        return total / (len(self.weights) + (self.multiplier > 0))

    def largest(self, step: "_Point") -> float:
        """The part of the step at which the first number reaches 0."""
        rates = [-float((step.weights / self.weights).min()), -float((step.duals / self.duals).min())]
        if self.multiplier > 0:
            rates += [-step.slack / self.slack, -step.multiplier / self.multiplier]
        return 1.0 / max(1e-300, *rates)


def _start(components: int, guard: _Guard | None) -> _Point:
    """Equal weights, whether or not they keep the guard, and equal products with all multipliers."""
    weights = torch.full((components,), 1.0 / components, dtype=torch.float64, device="cpu")
    slack = 1.0 if guard is None else max(_room(guard, weights), 0.1)
    return _Point(weights, torch.ones_like(weights), slack, 0.0 if guard is None else 1.0 / (components * slack))


class _State(NamedTuple):
    """Quantities at a point: the gradients of log density and squared error (K,), and the proved gap.

    `miss` is w^T A w + slack - limit.
    """

    slope: Tensor
    pull: Tensor
    miss: float
    gap: float

    @classmethod
    def at(cls, point: _Point, densities: Tensor, shares: Tensor, guard: _Guard | None) -> "_State":
        """Compute the quantities at a point."""
        weights = point.weights
        slope = (shares / (densities @ weights)) @ densities
        if guard is None:
            return cls(slope, torch.zeros_like(slope), 0.0, max(0.0, float(slope.max() - weights @ slope)))
        pull, room = 2.0 * guard.products @ weights, _room(guard, weights)
        net = slope - point.multiplier * pull
        gap = float(net.max() - weights @ net) + point.multiplier * room
        return cls(slope, pull, point.slack - room, max(0.0, gap))


def _newton(
    point: _Point, state: _State, densities: Tensor, shares: Tensor, guard: _Guard | None
) -> Callable[[float], _Point]:
    """The step of all unknowns as a function of the target, by a linear system.

    Its unknowns are step / weights (K,) and the multipliers of the sum and of the guard after the step.
    """
    weights, duals, slack, multiplier = point
    size = len(weights)
    ratios = densities / (densities @ weights).unsqueeze(1)
    hessian = (ratios * shares.unsqueeze(1)).T @ ratios
    system = torch.zeros(size + 2, size + 2, dtype=torch.float64, device="cpu")
    system[:size, size], system[size, :size] = 1.0, weights
    system[size + 1, size + 1] = -1.0
    if guard is not None:
        hessian = hessian + 2.0 * multiplier * guard.products
        system[:size, size + 1], system[size + 1, :size] = state.pull, state.pull * weights
        system[size + 1, size + 1] = -slack / multiplier
    system[:size, :size] = hessian * weights + torch.diag(duals)  # rows are not scaled: tiny weights keep their digits
    factors, pivots = torch.linalg.lu_factor(system)

    def step(target: float) -> _Point:
        right = torch.cat([state.slope + target / weights, torch.zeros(2, dtype=torch.float64, device="cpu")])
        if guard is not None:
            right[size + 1] = -target / multiplier - state.miss
        solution = torch.linalg.lu_solve(factors, pivots, right.unsqueeze(1)).squeeze(1)
        relative = solution[:size]
        change, dual_change = weights * relative, target / weights - duals * relative - duals
        if guard is None:
            return _Point(change, dual_change, 0.0, 0.0)
        slack_change = -state.miss - float(state.pull @ change)
        return _Point(change, dual_change, slack_change, float(solution[size + 1]) - multiplier)

    return step


def _room(guard: _Guard, weights: Tensor) -> float:
    """Return how far the squared error is below the guard's limit, relative to the limit."""
    return 1.0 - float(weights @ guard.products @ weights)


def _dropped(weights: Tensor, densities: Tensor, shares: Tensor, guard: _Guard | None, least: float) -> Tensor:
    """The weights without small ones, the smallest first, unless that costs too much or breaks the guard."""
    allowed = float(shares @ (densities @ weights).log()) - least
    for index in weights.argsort().tolist():
        if weights[index] >= least:
            break
        trial = weights.clone()
        trial[index] = 0.0
        trial = trial / trial.sum()
        guarded = guard is None or _room(guard, trial) >= -_SLACK
        if guarded and float(shares @ (densities @ trial).log()) >= allowed:
            weights = trial
    return weights
