"""The Metropolis-adjusted microcanonical sampler."""

import math
from dataclasses import dataclass, field

from torch import Tensor

from posterity.inference.acceleration import Potential
from posterity.kernels import AutoMass, Mass, Place
from posterity.kernels.microcanonical import isokinetic, unit
from posterity.methods.parts.sampler import refuse_single
from posterity.methods.parts.trajectories import Trajectories
from posterity.model import Data, Problem
from posterity.numerics.random import Key


@dataclass(frozen=True)
class MAMS(Trajectories):
    """Microcanonical dynamics, whose velocities have a fixed length, with the Metropolis rule.

    **Math**: see `kernels.microcanonical`. A transition draws a direction uniformly and moves for a distance h T, h as
    in `ChEES`; the end is taken with probability min(1, pi(x') / pi(x) |Jacobian|). T, the step size and the mass are
    learnt as there, for an acceptance of `target_accept`; distances are in units of the mass. `MCLMC` is the same
    without the rule that makes it exact.

    **Limit**: exact for smooth densities of two or more parameters whose chains mix.

    **Cost**: 3 T / (2 step size) gradients over all rows a transition, two for each step; no chain waits for another.

    **References**: Robnik, Cohn-Gordon and Seljak (2025), Metropolis adjusted microcanonical Hamiltonian Monte Carlo.
    The length is learnt by the ChEES criterion, not from autocorrelations.

    **Example**:

    >>> import posterity as po
    >>> density = po.Density(lambda x: -0.5 * x.square().sum(), {"x": (2,)})
    >>> q, trace = po.infer(MAMS(draws=200, warmup=200, chains=16), density, None)
    >>> bool((q.theta.std() - 1).abs() < 0.1)
    True
    """

    draws: int = 1000
    warmup: int = 1000
    chains: int = 4
    thin: int = 1
    step_size: float | None = None
    length: float | None = None
    target_accept: float = 0.9
    max_steps: int = 1000
    mass: Mass = field(default_factory=AutoMass)

    integrator = staticmethod(isokinetic)
    gradients = 2

    def prepared(self, joint: Problem, data: Data) -> Problem:
        """Check that there are two parameters, and what other samplers check."""
        refuse_single(type(self).__name__, joint)
        return super().prepared(joint, data)

    def _first_step(self, target: Potential, place: Place, scale: Tensor, key: Key) -> Tensor:
        # Velocities of unit length are slower than normal momenta.
        return super()._first_step(target, place, scale, key) * self.speed(place.position.shape[-1])

    def _fresh(self, noise: Tensor) -> Tensor:
        return unit(noise)

    @staticmethod
    def speed(size: int) -> float:
        return math.sqrt(size)

    @staticmethod
    def energy(start: Place, velocity: Tensor, after: Place) -> Tensor:
        return -after.value
