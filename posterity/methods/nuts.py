"""The no-U-turn sampler."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from posterity.errors import positive_whole
from posterity.inference.acceleration import Potential
from posterity.inference.method import Work
from posterity.kernels import DiagonalMass, Mass, Move, Place, no_u_turn
from posterity.methods.parts.sampler import SMALLEST, KeptDraw, Sampler, SamplerState, Tuning
from posterity.methods.parts.work import leapfrog_work
from posterity.model.data import Data
from posterity.model.problem import Problem
from posterity.numerics.random import Key
from posterity.posteriors.samples import CUT_OFF, Samples

POOL = 8  # pieces of trajectory whose noise is drawn at once
TOGETHER = 3  # doublings that are one piece of machine code: hardly a tree stops sooner, and each call costs


@dataclass(frozen=True)
class NUTS(Sampler):
    """The no-U-turn sampler: Hamiltonian trajectories that stop by themselves, for all chains at once.

    **Math**: see `kernels.no_u_turn`. The first `warmup` transitions set the step size by dual averaging, so that
    points of trajectories are accepted with probability `target_accept` on average, and the `mass` from the
    covariance of the draws in windows that double in length; all chains of a problem learn together. After that
    nothing changes, and of `draws * thin` transitions every `thin`-th is kept. A given `step_size` is held.

    **Limit**: exact for densities that are smooth and whose chains mix: look at `diagnostics.convergence(q)`. Modes
    that are far apart are not all found. Trajectories have at most 2^max_depth - 1 steps.

    **Cost**: some ten to a thousand gradients over all rows for each draw; chains wait for the longest trajectory.
    With `accelerate="auto"`, `infer` records the operations of runs of 2,000 transitions or 20,000 leapfrogs and more,
    and compiles runs of some 70,000, which takes some thirty seconds once: machine code is kept on the disk, and found
    again in other processes.

    **References**: Hoffman and Gelman (2014), The no-U-turn sampler; Betancourt (2017), A conceptual introduction to
    Hamiltonian Monte Carlo; Carpenter et al. (2017), Stan (warm-up).

    **Example**:

    >>> import posterity as po
    >>> density = po.Density(lambda x: -0.5 * x.square().sum(), {"x": (2,)})
    >>> q, trace = po.infer(NUTS(draws=200, warmup=100, chains=4), density, None)
    >>> q.theta.shape, bool((q.theta.std() - 1).abs() < 0.1)
    (torch.Size([4, 200, 2]), True)
    """

    draws: int = 1000
    warmup: int = 1000
    chains: int = 4
    thin: int = 1
    step_size: float | None = None
    target_accept: float = 0.8
    max_depth: int = 10
    mass: Mass = field(default_factory=DiagonalMass)

    cautious: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        positive_whole("NUTS.max_depth", self.max_depth)

    def posterior(self, joint: Problem, kept: Sequence[KeptDraw]) -> Samples:
        """Samples whose statistics say which trajectories were cut off at `max_depth`."""
        q = super().posterior(joint, kept)
        return replace(q, statistics={**q.statistics, CUT_OFF: q.statistics["depth"] >= self.max_depth})

    @property
    def vectors(self) -> int:
        # The state, a tree and its branch, a leapfrog; four numbers of each of four points; two for each further
        # doubling, at most: the run decides how many there are.
        return 27 + 4 * 4 + 2 * max(0, self.max_depth - 2)

    def work(self, joint: Problem, data: Data) -> Work | None:
        return leapfrog_work(joint, data, self.chains, None)

    def _transition(self, target: Potential, state: SamplerState, key: Key) -> tuple[Place, Move, SamplerState]:
        place, tuning = state.place, Tuning(**state.tuning)
        chains, like, depths = len(place.value), place.position, self.max_depth
        normal, coins = self._noise(like, 2 * depths + 1 + 2 * POOL, key)
        directions = (coins[: depths + 1] < 0.5).to(like.dtype).mul_(2.0).sub_(1.0)
        logs = coins[depths + 1 :].log_()
        pool, used = logs[depths:].view(POOL, 2, chains), 0

        def noise(pieces: int) -> Tensor:
            nonlocal used
            used += pieces
            if used <= POOL:
                return pool[used - pieces : used]
            uniform = key.fold(used).uniform((pieces, 2, chains), torch.float32, like.device)
            return uniform.clamp_(min=SMALLEST).to(like.dtype).log_()

        first = TOGETHER if target.accelerated else 2
        end = no_u_turn(
            *(target, place, normal, tuning.step_size, tuning.scale),
            *(directions, logs[:depths], noise, target.run, first),
        )
        return *end, state
