"""Hamiltonian Monte Carlo with trajectories of a learnt length: ChEES."""

from dataclasses import dataclass, field

from torch import Tensor

from posterity.kernels import AutoMass, Mass, Place, Target, leapfrog
from posterity.methods.parts.trajectories import Trajectories


def _hamiltonian(
    target: Target, place: Place, velocity: Tensor, step_size: Tensor, steps: int
) -> tuple[Place, Tensor, Tensor]:
    end, last = leapfrog(target, place, velocity, step_size, steps)
    return end, last, 0.5 * (velocity.square().sum(-1) - last.square().sum(-1))


@dataclass(frozen=True)
class ChEES(Trajectories):
    """Hamiltonian Monte Carlo that learns the length of its trajectories from all chains.

    **Math**: as `HMC`, for a time h T in transition t, in as few steps as the step size allows, but 1, 2 or a multiple
    of 4, which are shortened to fit. h is between 1/2 and 1, by the t-th number of Halton's sequence, and the same for
    all chains. The warm-up finds the longest time T, in units of the mass, by stochastic ascent of the criterion
    E (|x' - m|^2 - |x - m|^2)^2 / 4, the change of the squared distance from the mean m (see `kernels.lengths`), and a
    step size at which the harmonic mean of the acceptance over chains is `target_accept`. A given `length` T is held.
    The mass has correlations of up to 100 parameters (`AutoMass`); all else is as in `NUTS`.

    **Limit**: exact for smooth densities whose chains mix. One length serves all parts of the target: `NUTS` adapts to
    each. The criterion is noisy with few chains: take 16 or more where the device allows. Trajectories have at most
    `max_steps` leapfrogs, rounded up as above.

    **Cost**: 3 T / (4 step size) gradients over all rows a transition; chains never wait for one another.

    **References**: Hoffman, Radul and Sountsov (2021), An adaptive-MCMC scheme for setting trajectory lengths in
    Hamiltonian Monte Carlo. There h is between 0 and 1 and the acceptance 0.651; here the mass matrix is learnt,
    and m a mean over time and chains.

    **Example**:

    >>> import posterity as po
    >>> density = po.Density(lambda x: -0.5 * x.square().sum(), {"x": (2,)})
    >>> q, trace = po.infer(ChEES(draws=100, warmup=100, chains=16), density, None)
    >>> bool((q.theta.std() - 1).abs() < 0.1)
    True
    """

    draws: int = 1000
    warmup: int = 1000
    chains: int = 16
    thin: int = 1
    step_size: float | None = None
    length: float | None = None
    target_accept: float = 0.75
    max_steps: int = 1000
    mass: Mass = field(default_factory=AutoMass)

    integrator = staticmethod(_hamiltonian)
    gradients = 1

    def _fresh(self, noise: Tensor) -> Tensor:
        return noise

    @staticmethod
    def speed(size: int) -> float:
        return 1.0

    @staticmethod
    def energy(start: Place, velocity: Tensor, after: Place) -> Tensor:
        return 0.5 * velocity.square().sum(-1) - start.value
