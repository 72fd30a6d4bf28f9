"""Unadjusted Langevin dynamics."""

from dataclasses import dataclass

from posterity.errors import positive
from posterity.inference.acceleration import Potential
from posterity.kernels import Move, Place, UnitMass, unadjusted
from posterity.methods.parts.sampler import Sampler, Tuning, Warmup
from posterity.numerics.random import Key


@dataclass(frozen=True)
class Langevin(Sampler):
    """Unadjusted Langevin dynamics over all rows: every step is taken.

    **Math**: theta <- theta + s grad log pi(theta) + sqrt(2 s) noise, s = `step_size`. The first `warmup` steps are
    left out, then every `thin`-th is kept.

    **Limit**: biased: on a normal target of precision h the variance is 1 / (h (1 - s h / 2)), and the chain runs off
    for s >= 2 / h. `MALA` is the same with the rule that makes it exact.

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
    warmup: int = 1000
    chains: int = 4
    thin: int = 10
    step_size: float = 1e-3

    def __post_init__(self) -> None:
        self._check_counts()
        positive("Langevin.step_size", self.step_size)

    def _schedule(self) -> Warmup:
        return Warmup(self.warmup, None, UnitMass())

    def _transition(self, target: Potential, place: Place, tuning: Tuning, key: Key) -> tuple[Place, Move]:
        noise, _ = self._noise(place, 0, key)
        return self._whitened(unadjusted, target, place, tuning, noise)
