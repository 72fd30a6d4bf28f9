"""Hamiltonian Monte Carlo with trajectories of a fixed number of steps."""

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from posterity.errors import fraction, positive_whole
from posterity.inference.acceleration import Potential
from posterity.inference.method import Work
from posterity.kernels import DiagonalMass, Mass, Move, Place, whitened
from posterity.kernels.hamiltonian import judged, leapfrog
from posterity.methods.parts.sampler import Sampler, SamplerState, Tuning
from posterity.methods.parts.work import leapfrog_work
from posterity.model import Data, Problem
from posterity.numerics.random import Key
from posterity.storage import clone

TOGETHER = 4  # leapfrogs in one piece of work


@dataclass(frozen=True)
class HMC(Sampler):
    """Hamiltonian Monte Carlo: `steps` leapfrogs a transition, for all chains at once.

    **Math**: see `kernels.hamiltonian`. The step size of each transition is drawn from (1 - jitter, 1 + jitter) times
    the one that is set by the warm-up (or given and held), so that trajectories do not return to their start. Warm-up,
    `draws` and `thin` are as in `NUTS`.

    **Limit**: exact for smooth densities whose chains mix; the length of the trajectories is yours to choose.

    **Cost**: `steps` gradients over all rows a transition, of all chains together.

    **References**: Neal (2011), MCMC using Hamiltonian dynamics.

    **Example**:

    >>> import posterity as po
    >>> density = po.Density(lambda x: -0.5 * x.square().sum(), {"x": (2,)})
    >>> q, trace = po.infer(HMC(draws=200, warmup=100, chains=4, steps=5), density, None)
    >>> bool((q.theta.std() - 1).abs() < 0.1)
    True
    """

    calm = True

    draws: int = 1000
    warmup: int = 1000
    chains: int = 4
    thin: int = 1
    steps: int = 20
    step_size: float | None = None
    jitter: float = 0.2
    target_accept: float = 0.8
    mass: Mass = field(default_factory=DiagonalMass)

    cautious: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        positive_whole("HMC.steps", self.steps)
        fraction("HMC.jitter", self.jitter)

    def work(self, joint: Problem, data: Data) -> Work | None:
        transitions = self.warmup + self.draws * self.thin
        return leapfrog_work(joint, data, self.chains, self.steps * transitions)

    def _transition(self, target: Potential, state: SamplerState, key: Key) -> tuple[Place, Move, SamplerState]:
        place, tuning = state.place, Tuning(**state.tuning)
        momentum, coins = self._noise(place.position, 2, key)
        step_size = tuning.step_size * (1.0 + self.jitter * (2.0 * coins[1] - 1.0))
        origin = place._replace(position=torch.zeros_like(place.position))
        end, last, left = origin, momentum, self.steps
        while left:
            steps = min(left, TOGETHER)
            end, last = target.run(_moved, target, place.position, tuning.scale, end, last, step_size, steps)
            left -= steps
        move: tuple[Place, Move] = target.run(judged, origin, momentum, end, last, coins[0].log(), self.steps)
        return *clone(move), state


def _moved(
    target: Potential, start: Tensor, scale: Tensor, place: Place, momentum: Tensor, step_size: Tensor, steps: int
) -> tuple[Place, Tensor]:
    return leapfrog(whitened(target, start, scale), place, momentum, step_size.unsqueeze(-1), steps)
