"""L-BFGS over flat vectors, one evaluation at a time, for one weight vector or for members side by side."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from posterity.errors import positive, positive_whole
from posterity.optim.optimizer import Optimizer, StepSize

ARMIJO = 1e-4  # share of the first slope by which the value must fall along a step
WOLFE = 0.9  # share of the first slope to which the slope must rise
TRIES = 20  # evaluations of a line search
STALLED = 8  # steps in a row without a gain that the dtype can show
GAIN = 1e-11  # nats that count as a gain
ROUNDING = 16.0  # rounding error of a value, in units of its last digit


class LBFGSState(NamedTuple):
    """The search from theta (..., P): all but `trial`, `grad`, `direction` and the pairs is of shape (...).

    The next evaluation is at `trial`, theta + `length` `direction`. `value`, `grad` and `slope`, the derivative along
    the direction, are of the negative objective at theta. The line search lies between `low` and `high` (-1: open),
    with the slopes there. `steps` and `changes` (..., m, P) hold the last `pairs` pairs, newest last.
    """

    trial: Tensor
    value: Tensor
    grad: Tensor
    direction: Tensor
    slope: Tensor
    length: Tensor
    low: Tensor
    high: Tensor
    slope_low: Tensor
    slope_high: Tensor
    steps: Tensor
    changes: Tensor
    pairs: Tensor
    tries: Tensor
    stalled: Tensor
    begun: Tensor
    converged: Tensor


def _inner(a: Tensor, b: Tensor) -> Tensor:
    return (a.to(torch.float64) * b.to(torch.float64)).sum(-1)


@dataclass(frozen=True)
class LBFGS(Optimizer):
    """Limited-memory BFGS with a line search: for objectives without noise, such as a log density over all rows.

    **Math**: theta <- theta + t H grad, H the inverse Hessian of the negative objective that the last `memory` pairs
    s = change of theta, y = change of the gradient give, in compact form. The length t meets the weak Wolfe conditions,
    or the approximate ones, which compare slopes, where values differ by rounding alone. Each call of `climb` takes
    the objective at one trial point, so that a step of a run is one evaluation. Pairs with s . y <= 0 are left out. It
    has converged when (grad H grad / P)^1/2, the distance to the mode in posterior standard deviations, is below
    `tolerance`, or when the dtype shows no further gain. Members are independent of each other.

    **Limit**: a local mode, to rounding; superlinear near it. The gradient must be of the same objective in every
    call: no mini-batches.

    **Cost**: one evaluation a call, and passes over 2 `memory` + 5 vectors of theta's size, which are kept.

    **References**: Nocedal and Wright (2006), chapters 6 and 7; Byrd, Nocedal and Schnabel (1994), Representations of
    quasi-Newton matrices, theorem 2.2; Lewis and Overton (2013), Nonsmooth optimization via quasi-Newton methods,
    section 4; Hager and Zhang (2005), A new conjugate gradient method with guaranteed descent, eq. 4.1.

    **Example**:

    >>> theta = torch.zeros(2, dtype=torch.float64)
    >>> optimizer = LBFGS()
    >>> state = optimizer.init(theta)
    >>> while not state.converged:
    ...     x = state.trial
    ...     value = -(1 - x[0]) ** 2 - 100 * (x[1] - x[0] ** 2) ** 2
    ...     slope = -400 * x[0] * (x[1] - x[0] ** 2)
    ...     grad = torch.stack([2 * (1 - x[0]) - slope, -200 * (x[1] - x[0] ** 2)])
    ...     state = optimizer.climb(theta, value, grad, state)
    >>> theta
    tensor([1.0000, 1.0000], dtype=torch.float64)
    """

    memory: int = 30
    tolerance: float = 1e-9

    step_size = 1.0  # the length that a line search tries first

    def __post_init__(self) -> None:
        positive_whole("LBFGS.memory", self.memory)
        positive("LBFGS.tolerance", self.tolerance)

    def init(self, theta: Tensor) -> LBFGSState:
        zero = torch.zeros(theta.shape[:-1], dtype=torch.float64, device=theta.device)
        count, vectors = torch.zeros_like(zero, dtype=torch.int64), (*theta.shape[:-1], self.memory, theta.shape[-1])
        return LBFGSState(
            trial=theta.clone(),
            value=zero,
            grad=torch.zeros_like(theta),
            direction=torch.zeros_like(theta),
            slope=zero,
            length=zero,
            low=zero,
            high=zero,
            slope_low=zero,
            slope_high=zero,
            steps=theta.new_zeros(vectors),
            changes=theta.new_zeros(vectors),
            pairs=count,
            tries=count,
            stalled=count,
            begun=torch.zeros_like(zero, dtype=torch.bool),
            converged=torch.zeros_like(zero, dtype=torch.bool),
        )

    def ascend(self, theta: Tensor, grad: Tensor, state: Any, step_size: StepSize, divisor: float) -> Any:
        raise TypeError(
            "LBFGS needs the value of the objective over all rows. Use it in MAP(optimizer=LBFGS()), or use Adam here."
        )

    @torch.no_grad()
    def climb(self, theta: Tensor, value: Tensor, grad: Tensor, state: LBFGSState) -> LBFGSState:
        """Take the objective's value (...) and gradient (..., P) at `state.trial`; moves `theta` in place.

        theta is the best point so far. The next evaluation is at the `trial` of the returned state.
        """
        f, g = -value.to(torch.float64), -grad
        slope = _inner(g, state.direction)
        finite = torch.isfinite(f) & torch.isfinite(slope)
        rounding = ROUNDING * torch.finfo(theta.dtype).eps * state.value.abs()
        falls = f <= state.value + ARMIJO * state.length * state.slope
        falls |= (f <= state.value + rounding) & (slope <= (2.0 * ARMIJO - 1.0) * state.slope)
        falls &= finite
        flat = slope >= WOLFE * state.slope
        tries = state.tries + 1
        first, active = ~state.begun, ~state.converged
        accepted = active & (first | (falls & (flat | (tries >= TRIES))))
        moved = accepted.unsqueeze(-1)

        steps, changes, pairs = _with_pair(state, torch.where(moved, state.trial - theta, 0.0), g, accepted & ~first)
        gained = state.value - f > rounding.clamp_min(GAIN)
        stalled = torch.where(accepted & ~first, torch.where(gained, 0, state.stalled + 1), state.stalled)
        theta.copy_(torch.where(moved, state.trial, theta))
        best, best_grad = torch.where(accepted, f, state.value), torch.where(moved, g, state.grad)

        # Neither a shorter nor a longer step is left: begin anew along the gradient, or give up where that failed.
        lost = active & ~accepted & (tries >= TRIES)
        pairs = torch.where(lost, 0, pairs)
        anew = accepted | lost
        direction = _direction(best_grad, steps, changes, pairs)
        direction = torch.where(anew.unsqueeze(-1), direction, state.direction)
        along = torch.where(anew, _inner(best_grad, direction), state.slope)
        near = -along <= self.tolerance**2 * theta.shape[-1]
        ended = (accepted & (pairs > 0) & near) | (accepted & (along == 0.0)) | (stalled >= STALLED)
        ended |= lost & (state.pairs == 0)

        longer, shorter = active & falls & ~flat & ~accepted, active & ~falls & ~accepted
        low, slope_low = torch.where(longer, state.length, state.low), torch.where(longer, slope, state.slope_low)
        high = torch.where(shorter, state.length, state.high)
        rising = torch.where(finite, slope, 0.0).clamp_min(0.0)
        slope_high = torch.where(shorter, rising, state.slope_high)
        length = torch.where(anew, 1.0, _between(low, high, slope_low, slope_high))
        trial = torch.where(ended.unsqueeze(-1), theta, theta + length.unsqueeze(-1).to(theta.dtype) * direction)
        return LBFGSState(
            trial=trial,
            value=best,
            grad=best_grad,
            direction=direction,
            slope=along,
            length=length,
            low=torch.where(anew, 0.0, low),
            high=torch.where(anew, -1.0, high),
            slope_low=torch.where(anew, along, slope_low),
            slope_high=torch.where(anew, 0.0, slope_high),
            steps=steps,
            changes=changes,
            pairs=pairs,
            tries=torch.where(anew, 0, tries),
            stalled=stalled,
            begun=torch.ones_like(state.begun),
            converged=state.converged | ended,
        )


def _with_pair(state: LBFGSState, step: Tensor, grad: Tensor, accepted: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The pairs with the newest at the end, where it was accepted and has positive curvature."""
    change = torch.where(accepted.unsqueeze(-1), grad - state.grad, 0.0)
    curved = _inner(step, change)
    size = (_inner(step, step) * _inner(change, change)).sqrt()
    added = accepted & (curved > torch.finfo(step.dtype).eps * size)
    if not bool(added.any()):
        return state.steps, state.changes, state.pairs
    held = []
    for old, new in ((state.steps, step), (state.changes, change)):
        shifted = torch.cat([old[..., 1:, :], new.unsqueeze(-2)], dim=-2)
        held.append(torch.where(added[..., None, None], shifted, old))
    return held[0], held[1], torch.where(added, (state.pairs + 1).clamp_max(state.steps.shape[-2]), state.pairs)


def _direction(grad: Tensor, steps: Tensor, changes: Tensor, pairs: Tensor) -> Tensor:
    """-H grad by the last pairs; without any, along the gradient by at most 1 in norm."""
    memory = steps.shape[-2]
    known = torch.arange(memory, device=grad.device) >= memory - pairs.unsqueeze(-1)  # (..., m)
    s, y, g = (tensor.to(torch.float64) for tensor in (steps, changes, grad))
    s, y = s * known.unsqueeze(-1), y * known.unsqueeze(-1)
    products, squares = s @ y.mT, y @ y.mT  # (..., m, m)
    diagonal = products.diagonal(dim1=-2, dim2=-1)
    newest = squares[..., -1, -1]
    size = g.norm(dim=-1).clamp_min(torch.finfo(torch.float64).tiny)
    gamma = torch.where(
        pairs > 0, diagonal[..., -1] / torch.where(newest > 0.0, newest, 1.0), size.reciprocal().clamp_max(1.0)
    )
    gamma = gamma.unsqueeze(-1)
    upper = products.triu() + torch.diag_embed((~known).to(torch.float64))
    a, b = (s @ g.unsqueeze(-1)), (y @ g.unsqueeze(-1)).squeeze(-1)
    p = torch.linalg.solve_triangular(upper, a, upper=True)
    inner = diagonal * p.squeeze(-1) + gamma * ((squares @ p).squeeze(-1) - b)
    q = torch.linalg.solve_triangular(upper.mT, inner.unsqueeze(-1), upper=False)
    product = gamma * g + (s.mT @ q).squeeze(-1) - gamma * (y.mT @ p).squeeze(-1)
    good = torch.isfinite(product).all(-1) & ((product * g).sum(-1) > 0.0)
    plain = g * size.reciprocal().clamp_max(1.0).unsqueeze(-1)
    return -torch.where(good.unsqueeze(-1), product, plain).to(grad.dtype)


def _between(low: Tensor, high: Tensor, slope_low: Tensor, slope_high: Tensor) -> Tensor:
    """The next length: by the secant of the slopes inside the bracket, or further out while it is open."""
    width = high - low
    secant = slope_low / torch.where(slope_high > slope_low, slope_low - slope_high, -1.0)
    share = torch.where(slope_high > 0.0, secant.clamp(0.1, 0.9), 0.3)
    return torch.where(high < 0.0, 4.0 * low, low + share * width)
