"""The Metropolis-adjusted Langevin algorithm."""

from dataclasses import dataclass, field

from torch import Tensor

from posterity.inference.acceleration import Potential
from posterity.kernels import DiagonalMass, Mass, Move, Place, adjusted
from posterity.methods.parts.sampler import Sampler, SamplerState
from posterity.numerics.random import Key


@dataclass(frozen=True)
class MALA(Sampler):
    """Langevin steps with the Metropolis rule.

    **Math**: see `kernels.adjusted`; with the `mass` of the warm-up the proposal is x + s C grad log pi(x) +
    sqrt(2 s) L noise, C = L L^T its covariance. Warm-up, `draws` and `thin` are as in `NUTS`; `step_size` is s.

    **Limit**: exact; a random walk over long distances, so that P^(1/3) gradients are needed for a fresh draw.

    **Cost**: one gradient over all rows a transition.

    **References**: Roberts and Rosenthal (1998), Optimal scaling of discrete approximations to Langevin diffusions
    (`target_accept`).

    **Example**:

    >>> import posterity as po
    >>> density = po.Density(lambda x: -0.5 * x.square().sum(), {"x": (2,)})
    >>> q, trace = po.infer(MALA(draws=500, warmup=200, chains=8), density, None)
    >>> bool((q.theta.std() - 1).abs() < 0.1)
    True
    """

    calm = True

    draws: int = 10_000
    warmup: int = 1000
    chains: int = 4
    thin: int = 10
    step_size: float | None = None
    target_accept: float = 0.574
    mass: Mass = field(default_factory=DiagonalMass)

    def _first_step(self, target: Potential, place: Place, scale: Tensor, key: Key) -> Tensor:
        # One leapfrog of size e is a Langevin step of size e^2 / 2.
        return 0.5 * super()._first_step(target, place, scale, key).square()

    def _transition(self, target: Potential, state: SamplerState, key: Key) -> tuple[Place, Move, SamplerState]:
        noise, coins = self._noise(state.draw.theta, 1, key)
        return *self._whitened(adjusted, target, state, noise, coins[0].log()), state
