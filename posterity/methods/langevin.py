"""Unadjusted Langevin dynamics."""

from dataclasses import dataclass

import torch
from torch import Tensor

from posterity.errors import positive
from posterity.inference.acceleration import Potential
from posterity.kernels import DiagonalMass, Move, Place, UnitMass, unadjusted
from posterity.kernels.state import whitened
from posterity.methods.parts.sampler import Adaptation, KeptDraw, Sampler, SamplerState, Tuning, Warmup
from posterity.numerics.random import Key

_FINE, _COARSE = 0.1, 0.5  # step sizes times the largest curvature: of draws, and of the warm-up
_ROUNDS, _REACH = 12, 0.1  # of the search for that curvature: gradients, and their distance in standard deviations


@dataclass(frozen=True)
class Langevin(Sampler):
    """Unadjusted Langevin dynamics over all rows: every step is taken.

    **Math**: theta <- theta + s grad log pi(theta) + sqrt(2 s) noise, s = `step_size`. The first `warmup` steps are
    left out, then every `thin`-th is kept. Where `step_size` is left out (None) the warm-up learns a scale L for each
    parameter, and steps are theta + s L^2 grad + sqrt(2 s) L noise with s = 0.1 / h, h the largest curvature of the log
    density in units of L where the chains are.

    **Limit**: biased: on a normal target of precision h the variance is 1 / (h (1 - s h / 2)), and the chain runs off
    for s >= 2 / h. With `step_size=None` no variance is more than 5 % too large there. `MALA` is the same with the rule
    that makes it exact.

    **Cost**: one gradient over all rows a step.

    **References**: Roberts and Tweedie (1996), Exponential convergence of Langevin distributions.

    **Example**:

    >>> import posterity as po
    >>> density = po.Density(lambda x: -0.5 * x.square().sum(), {"x": (2,)})
    >>> q, trace = po.infer(Langevin(draws=500, warmup=100, chains=20, step_size=0.5), density, None)
    >>> bool((q.theta.var() - 1 / 0.75).abs() < 0.1)
    True
    """

    draws: int = 10_000
    warmup: int = 2000
    chains: int = 4
    thin: int = 10
    step_size: float | None = None

    def __post_init__(self) -> None:
        self._check_counts()
        if self.step_size is not None:
            positive("Langevin.step_size", self.step_size, "or None")

    def _schedule(self) -> Warmup:
        return Warmup(self.warmup, None, DiagonalMass() if self.step_size is None else UnitMass())

    def _first_step(self, target: Potential, place: Place, scale: Tensor, key: Key) -> Tensor:
        """Step sizes (C,) by the largest curvature where the chains of a group are."""
        share = _COARSE if self.warmup else _FINE
        curvature = _largest_curvature(target, place, scale, key).reshape(len(scale), -1)
        return share / curvature.amax(1, keepdim=True).expand_as(curvature).reshape(-1)

    def _learnt(
        self, target: Potential, state: SamplerState, draw: KeptDraw, grad: Tensor, tuning: Tuning, key: Key
    ) -> tuple[Tensor, Tuning, Adaptation]:
        grad, tuning, known = super()._learnt(target, state, draw, grad, tuning, key)
        if self.step_size is None and state.step + 1 == self.warmup:
            place = Place(draw.theta, draw.log_density, grad)
            tuning = self._tuned(target, place, tuning.scale, key.fold("end"))
            tuning = tuning._replace(step_size=tuning.step_size * (_FINE / _COARSE))
        return grad, tuning, known

    def _transition(self, target: Potential, state: SamplerState, key: Key) -> tuple[Place, Move, SamplerState]:
        noise, _ = self._noise(state.draw.theta, 0, key)
        return *self._whitened(unadjusted, target, state, noise), state


def _largest_curvature(target: Potential, place: Place, scale: Tensor, key: Key) -> Tensor:
    """Largest curvature (C,) of the log density at each chain in coordinates of the scale, by a power iteration.

    Products with the Hessian are differences of gradients, so that curvature is seen over a tenth of a standard
    deviation. The gradient of `place` is in these coordinates.
    """
    density = whitened(target, place.position, scale)
    direction = key.normal(tuple(place.position.shape), torch.float32, place.position.device).to(place.position.dtype)
    smallest = torch.finfo(direction.dtype).tiny ** 0.5
    largest, reach = torch.ones_like(place.value), 1e-3
    for _ in range(_ROUNDS):
        unit = direction / torch.linalg.vector_norm(direction, dim=-1, keepdim=True).clamp_min(smallest)
        step = (reach / largest.sqrt()).unsqueeze(-1)
        product = (place.grad - density(step * unit)[1]) / step
        length = torch.linalg.vector_norm(product, dim=-1)
        good = torch.isfinite(length) & (length > smallest)
        largest = torch.where(good, length, largest)
        direction, reach = torch.where(good.unsqueeze(-1), product, direction), _REACH
    return largest
