"""SGD at constant steps that wanders about a mode as far as the posterior is wide."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from posterity.errors import positive, positive_whole
from posterity.optim.gradient_scale import GradientScale, ScaleState
from posterity.optim.optimizer import Optimizer, StepSize

_STABLE = 0.25  # step times largest curvature, at most
_OUTLIER = 25.0  # square of a gradient, in mean squares, beyond which its step is shortened
_FACTOR = 3.0  # 2 for gradient noise that is drawn anew in each step; more, as the batches of a pass balance


class StationarySGDState(NamedTuple):
    """The scales of the gradients, see `ScaleState`, shaped as theta, and the number of steps."""

    direction: Tensor
    squares: Tensor
    scale: Tensor
    numbers: Tensor
    steps: Tensor


@dataclass(frozen=True)
class StationarySGD(Optimizer):
    """SGD with a constant step for each weight, at which it wanders about a mode as far as the posterior is wide.

    **Math**: a `warmup` looks for a mode by Adam with steps of `rate` and learns V = E[grad^2] (`GradientScale`); then
    theta <- theta + step_size G grad, with G = 3 / V and grad the gradient of the whole log density on a batch. Along
    one weight of curvature h the stationary variance is v with E[theta grad] = -h v = -G V / 2: for independent batches
    G = 2 / V gives v = 1 / h exactly, whatever the noise of the gradients. Batches of a shuffled pass balance, so that
    G is larger by a half: it gives 0.84 / h for a model that is right. For stability G is at most
    `batches` / (4 lambda V), a quarter of the inverse of the largest curvature for such a model, and V is taken for
    12 `curvature` at least, that of the prior, which has no noise. A gradient beyond 5 sqrt(V) takes its own square for
    25 V, and one beyond 5 sqrt(lambda) in the direction of lambda is shortened to that.

    **Limit**: a diagonal G: in a bowl with axes that are not those of theta the width is that of each weight given the
    others, at least. With all rows in a batch there is no noise, and theta swings. There are no proximal steps.

    **Cost**: a few passes over theta, and three vectors of its size.

    **References**: Mandt, Hoffman and Blei (2017), Stochastic gradient descent as approximate Bayesian inference,
    sections 3 and 4.

    **Example**:

    >>> theta, rule = torch.zeros(1), StationarySGD(warmup=400, batches=40)
    >>> state, noise = rule.init(theta), torch.Generator().manual_seed(0)
    >>> seen = []
    >>> for step in range(4000):  # a bowl of curvature 4, with gradient noise of variance 36
    ...     grad = -4.0 * theta + 6.0 * torch.randn(1, generator=noise)
    ...     state = rule.ascend(theta, grad, state, rule.step_size, 1.0)
    ...     seen += [theta.clone()] if step >= 400 else []
    >>> 1.0 < float(torch.cat(seen).var()) * 4.0 < 2.0  # 3 / 2, as this noise is independent
    True
    """

    step_size: float = 1.0
    warmup: int = 1000
    batches: float = 16.0
    rate: float = 0.01
    curvature: float = 0.0

    def __post_init__(self) -> None:
        for name in ("step_size", "batches", "rate"):
            positive(f"StationarySGD.{name}", getattr(self, name))
        if not 0.0 <= self.curvature < math.inf:
            raise ValueError(f"StationarySGD.curvature must be a finite number of at least 0. Got {self.curvature!r}.")
        positive_whole("StationarySGD.warmup", self.warmup)

    def init(self, theta: Tensor) -> StationarySGDState:
        known = GradientScale(self.rate).init(theta.reshape(-1, theta.shape[-1]))
        return StationarySGDState(*known, torch.zeros((), dtype=torch.float64, device=theta.device))

    def ascend(
        self, theta: Tensor, grad: Tensor, state: StationarySGDState, step_size: StepSize, divisor: float
    ) -> StationarySGDState:
        rule = GradientScale(self.rate, self.batches)
        rows, slope = (t.reshape(-1, theta.shape[-1]) for t in (theta, grad))
        known = rule.learn(ScaleState(*state[:4]), rows, slope, state.steps, self.warmup)
        bound = (_FACTOR / _STABLE * rule.largest(known) / self.batches).clamp_min(1.0)
        step = step_size.to(theta.dtype) if isinstance(step_size, Tensor) else step_size
        least = _FACTOR / _STABLE * self.curvature
        squares = torch.maximum(rule.squares(known), slope.square() / _OUTLIER).clamp_min(least)
        along = (known.direction * slope / squares.sqrt()).sum(-1, keepdim=True).square()
        shorter = (_OUTLIER * rule.largest(known) / along.clamp_min(1e-12)).sqrt().clamp_max(1.0)
        moved = rows + step * _FACTOR * shorter * slope / (bound * squares)
        theta.copy_(rule.searched(rows, moved, known, state.steps, self.warmup).reshape(theta.shape))
        return StationarySGDState(*known, state.steps + 1.0)
