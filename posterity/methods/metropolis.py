"""Random-walk Metropolis."""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from posterity.inference.acceleration import Potential
from posterity.kernels import DiagonalMass, Mass, Move, Place, random_walk
from posterity.methods.parts.sampler import Sampler, SamplerState
from posterity.numerics.random import Key


@dataclass(frozen=True)
class Metropolis(Sampler):
    """Random-walk Metropolis: a normal step, taken by the ratio of the densities.

    **Math**: see `kernels.random_walk`; with the `mass` of the warm-up the step is s L noise. Warm-up, `draws` and
    `thin` are as in `NUTS`; `step_size` is s.

    **Limit**: exact for any density, smooth or not; about P transitions for a fresh draw.

    **Cost**: one value of the density over all rows a transition (the gradient is computed, too).

    **References**: Roberts, Gelman and Gilks (1997) (`target_accept`).

    **Example**:

    >>> import posterity as po
    >>> density = po.Density(lambda x: -0.5 * x.square().sum(), {"x": (2,)})
    >>> q, trace = po.infer(Metropolis(draws=500, warmup=200, chains=20), density, None)
    >>> bool((q.theta.std() - 1).abs() < 0.1)
    True
    """

    calm = True

    draws: int = 10_000
    warmup: int = 1000
    chains: int = 4
    thin: int = 10
    step_size: float | None = None
    target_accept: float = 0.234
    mass: Mass = field(default_factory=DiagonalMass)

    def _first_step(self, target: Potential, place: Place, scale: Tensor, key: Key) -> Tensor:
        return torch.full_like(place.value, 2.38 / math.sqrt(place.position.shape[-1]))

    def _transition(self, target: Potential, state: SamplerState, key: Key) -> tuple[Place, Move, SamplerState]:
        noise, coins = self._noise(state.draw.theta, 1, key)
        return *self._whitened(random_walk, target, state, noise, coins[0].log()), state
