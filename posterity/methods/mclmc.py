"""Microcanonical Langevin dynamics, unadjusted."""

import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from posterity.errors import positive, positive_whole
from posterity.inference.acceleration import Potential
from posterity.kernels import AutoMass, Mass, Move, Place
from posterity.kernels.metropolis import DIVERGENCE
from posterity.kernels.microcanonical import EnergySearch, microcanonical, no_energies, unit, with_energies
from posterity.kernels.state import chosen, whitened
from posterity.methods.parts.sampler import (
    Adaptation,
    KeptDraw,
    Sampler,
    SamplerState,
    Tuning,
    Warmup,
    refuse_single,
    shared,
)
from posterity.methods.parts.trajectories import pieces, there
from posterity.model import Data, Problem
from posterity.numerics.random import Key


@dataclass(frozen=True)
class MCLMC(Sampler):
    """Microcanonical Langevin Monte Carlo: `steps` steps a transition, every one is taken.

    **Math**: see `kernels.microcanonical`. Velocities have a fixed length, turn towards the gradient, and are forgotten
    over the distance `length` (None: sqrt(P), the radius of a standard normal in P dimensions), in units of the mass.
    The warm-up learns the mass (`AutoMass`), and the step size at which the variance of the energy error of a step is
    `energy_variance` for each parameter. A given `step_size` is held. Chains share what they learn; under `UnitMass()`
    each finds its own step size, as chains in far modes of a network need: start them at the members of an `Ensemble`.

    **Limit**: biased by the steps; the squared bias of variances falls with `energy_variance`. Needs two parameters.
    `MAMS` is the same with the rule that makes it exact.

    **Cost**: 2 `steps` gradients over all rows a transition.

    **References**: Robnik and Seljak (2024), Fluctuation without dissipation: microcanonical Langevin Monte Carlo;
    Sommer et al. (2025), Microcanonical Langevin ensembles.

    **Example**:

    >>> import posterity as po
    >>> density = po.Density(lambda x: -0.5 * x.square().sum(), {"x": (10,)})
    >>> q, trace = po.infer(MCLMC(draws=200, warmup=200), density, None)
    >>> bool((q.theta.std() - 1).abs() < 0.1)
    True
    """

    draws: int = 1000
    warmup: int = 1000
    chains: int = 4
    thin: int = 1
    steps: int = 5
    step_size: float | None = None
    length: float | None = None
    energy_variance: float = 5e-4
    mass: Mass = field(default_factory=AutoMass)

    target_accept: ClassVar[float] = 0.8  # type: ignore[misc]  # of a leapfrog, for the first guess of the step size

    def __post_init__(self) -> None:
        super().__post_init__()
        positive_whole("MCLMC.steps", self.steps)
        positive("MCLMC.energy_variance", self.energy_variance)
        if self.length is not None:
            positive("MCLMC.length", self.length, "or None")

    def prepared(self, joint: Problem, data: Data) -> Problem:
        """Check that there are two parameters, and what other samplers check."""
        refuse_single("MCLMC", joint)
        return super().prepared(joint, data)

    def _schedule(self) -> Warmup:
        return Warmup(self.warmup, None, self.mass)

    def _first_step(self, target: Potential, place: Place, scale: Tensor, key: Key) -> Tensor:
        return super()._first_step(target, place, scale, key) * math.sqrt(place.position.shape[-1])

    def _tuned(self, target: Potential, place: Place, scale: Tensor, key: Key) -> Tuning:
        tuning, size = super()._tuned(target, place, scale, key), place.position.shape[-1]
        length = torch.full_like(tuning.step_size, size**0.5 if self.length is None else self.length)
        return tuning._replace(length=length, velocity=unit(self._noise(place.position, 0, key.fold("velocity"))[0]))

    def _transition(self, target: Potential, state: SamplerState, key: Key) -> tuple[Place, Move, SamplerState]:
        place, tuning, like = state.place, Tuning(**state.tuning), state.draw.theta
        noise = key.normal((self.steps, *like.shape), torch.float32, like.device).to(like.dtype)
        origin = place._replace(position=torch.zeros_like(place.position))
        end, velocity, squares = origin, there(tuning.velocity), torch.zeros_like(place.value)
        for part in torch.split(noise, pieces(self.steps)):
            sizes = tuning.step_size, there(tuning.length)
            settings = place.position, tuning.scale, end, velocity, squares, part, *sizes
            end, velocity, squares = target.run(_walked, target, *settings)
        end, velocity, squares = target.lasting((end, velocity, squares))
        sane = (squares < DIVERGENCE**2) & torch.isfinite(end.value) & torch.isfinite(end.grad).all(-1)
        lost = ~sane & (end.value != torch.inf)  # there the run stops
        after = chosen(~lost, end, origin)
        velocity = torch.where(lost.unsqueeze(-1), -there(tuning.velocity), velocity)
        count = torch.full_like(squares, 2.0 * self.steps)
        move = Move((~lost).to(squares.dtype), -origin.value, lost, count, torch.zeros_like(squares))
        state = state._replace(tuning=tuning._replace(velocity=velocity).stored())
        if state.adaptation and self.step_size is None:
            state = self._searched(state, tuning, squares)
        return after, move, state

    def _searched(self, state: SamplerState, tuning: Tuning, squares: Tensor) -> SamplerState:
        """Update the search for the step size after steps with this sum of squared errors of the energy (C,)."""
        groups = len(tuning.scale)
        if self.mass.learns and self._schedule().together(state.step, len(squares) // groups):
            squares = shared(squares, groups)
        known = state.adaptation.get("energy")
        search = no_energies(squares) if known is None else EnergySearch(**known)
        ratio = squares / (self.steps * state.draw.theta.shape[-1] * self.energy_variance)
        search = with_energies(search, ratio, tuning.step_size)
        return state._replace(adaptation={**state.adaptation, "energy": search._asdict()})

    def _learnt(
        self, target: Potential, state: SamplerState, draw: KeptDraw, grad: Tensor, tuning: Tuning, key: Key
    ) -> tuple[Tensor, Tuning, Adaptation]:
        before = tuning.scale
        grad, tuning, known = super()._learnt(target, state, draw, grad, tuning, key)
        if self.step_size is not None:
            return grad, tuning, known
        if tuning.scale is before:
            return grad, tuning._replace(step_size=EnergySearch(**state.adaptation["energy"]).step_size), known
        return grad, tuning, {name: value for name, value in known.items() if name != "energy"}


def _walked(
    target: Potential,
    start: Tensor,
    scale: Tensor,
    place: Place,
    velocity: Tensor,
    squares: Tensor,
    noise: Tensor,
    step_size: Tensor,
    length: Tensor,
) -> tuple[Place, Tensor, Tensor]:
    sizes = step_size.unsqueeze(-1), length.unsqueeze(-1)
    end, velocity, more = microcanonical(whitened(target, start, scale), place, velocity, noise, *sizes)
    return end, velocity, squares + more
