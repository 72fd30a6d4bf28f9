"""Base of ChEES and MAMS: trajectories whose length the warm-up learns, jittered, with the Metropolis rule."""

import math
from abc import abstractmethod
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from posterity.errors import positive, positive_whole
from posterity.inference.acceleration import Potential
from posterity.kernels.lengths import LengthSearch, chees_slopes, lengthened, searching_from, van_der_corput
from posterity.kernels.metropolis import DIVERGENCE, accepted, finite_ratio
from posterity.kernels.state import Move, Place, Target, unspread, whitened
from posterity.methods.parts.sampler import Adaptation, KeptDraw, Sampler, SamplerState, Tuning, shared
from posterity.numerics.random import Key

LEAST = 0.5  # share of the longest trajectory that the shortest has
TOGETHER = 4  # steps in one piece of work
QUARTER = math.pi / 2  # of the period in a standard normal: the search goes on from no more after a change of the mass
FIRST = 8  # steps of the longest trajectory before any is learnt

Integrator = Callable[[Target, Place, Tensor, Tensor, int], tuple[Place, Tensor, Tensor]]
"""Steps from a place and velocities (C, P): the end, the velocities there, and what they add to the log ratio (C,)."""

Energy = Callable[[Place, Tensor, Place], Tensor]
"""The energy (C,) that is recorded of a transition from a place with velocities to another place."""


class Trajectories(Sampler):
    """Trajectories of a random share of the longest, the same for all chains, which end by the Metropolis rule.

    The longest is learnt in the warm-up by the ChEES criterion, in whitened coordinates.
    """

    calm = True
    cautious: ClassVar[bool] = True
    lockstep: ClassVar[bool] = True

    length: float | None
    max_steps: int
    gradients: ClassVar[int]
    """Gradients that a step of the integrator takes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        name = type(self).__name__
        if self.length is not None:
            positive(f"{name}.length", self.length, "or None")
        positive_whole(f"{name}.max_steps", self.max_steps)

    @staticmethod
    @abstractmethod
    def integrator(
        target: Target, place: Place, velocity: Tensor, step_size: Tensor, steps: int
    ) -> tuple[Place, Tensor, Tensor]:
        """Take steps from a place and velocities (C, P): see `Integrator`."""

    @abstractmethod
    def _fresh(self, noise: Tensor) -> Tensor:
        """Velocities made of normal numbers (C, P)."""

    @staticmethod
    @abstractmethod
    def energy(start: Place, velocity: Tensor, after: Place) -> Tensor:
        """Return the energy (C,) that is recorded of a transition."""

    @staticmethod
    @abstractmethod
    def speed(size: int) -> float:
        """Length of the velocities in P dimensions, over that of normal ones."""

    def _tuned(self, target: Potential, place: Place, scale: Tensor, key: Key) -> Tuning:
        tuning = super()._tuned(target, place, scale, key)
        first = FIRST * shared(tuning.step_size, len(scale))
        return tuning._replace(length=first if self.length is None else torch.full_like(first, self.length))

    def _transition(self, target: Potential, state: SamplerState, key: Key) -> tuple[Place, Move, SamplerState]:
        place, tuning = state.place, Tuning(**state.tuning)
        share = LEAST + (1.0 - LEAST) * van_der_corput(state.step + 1)
        normal, coins = self._noise(place.position, 1, key)
        velocity, kind = self._fresh(normal), type(self).integrator
        time = share * there(tuning.length)
        steps = rounded(min(self.max_steps, max(1, math.ceil(float((time / tuning.step_size).amax())))))
        step_size = torch.minimum(tuning.step_size, time / steps)
        origin = place._replace(position=torch.zeros_like(place.position))
        work, reached = (place.position, tuning.scale, step_size), (origin, velocity, torch.zeros_like(place.value))
        for piece in pieces(steps):
            reached = target.run(_carried, target, kind, *work, *reached, piece)
        decided = target.run_light(_decided, type(self).energy, *reached, origin, velocity, coins[0])
        after, move, end, last_velocity = target.lasting(decided)
        move = move._replace(leapfrogs=torch.full_like(move.accept, self.gradients * steps))
        if state.adaptation and self.length is None:
            sizes = tuning.step_size, tuning.scale, there(tuning.length)
            moved = state.draw.theta, sizes, end, last_velocity, share * move.accept
            known = target.lasting(target.run_light(_searched, _search(state, tuning), *moved, self.max_steps))
            state = state._replace(adaptation={**state.adaptation, "length": known._asdict()})
        return after, move, state

    def _learnt(
        self, target: Potential, state: SamplerState, draw: KeptDraw, grad: Tensor, tuning: Tuning, key: Key
    ) -> tuple[Tensor, Tuning, Adaptation]:
        before = tuning.scale
        grad, tuning, known = super()._learnt(target, state, draw, grad, tuning, key)
        if self.length is None:
            search = LengthSearch(**state.adaptation["length"])
            if tuning.scale is not before:  # lengths are in its units
                search = search.shifted(torch.log(_unit(before) / _unit(tuning.scale)).mean())
                search = search.below(math.log(QUARTER * self.speed(draw.theta.shape[-1])))
            ended = state.step + 1 == self.warmup
            tuning = tuning._replace(length=(search.average if ended else search.log_length).exp())
            known = {} if ended else {**known, "length": search._asdict()}
        elif self.step_size is None:  # longer steps are not taken, so that the search would find no end
            tuning = tuning._replace(step_size=torch.minimum(tuning.step_size, there(tuning.length)))
        return grad, tuning, known


def there(value: Tensor | None) -> Tensor:
    """Return what the first step has made."""
    assert value is not None
    return value


def rounded(steps: int) -> int:
    """Round a number of steps up to 1, 2 or a multiple of 4, so that few kinds of work are recorded or compiled.

    >>> [rounded(steps) for steps in (1, 2, 3, 5, 8)]
    [1, 2, 4, 8, 8]
    """
    return steps if steps <= 2 else TOGETHER * math.ceil(steps / TOGETHER)


def pieces(steps: int) -> list[int]:
    """Divide steps into pieces of work, of as few sizes as can be.

    >>> pieces(10)
    [4, 4, 2]
    """
    rest = steps % TOGETHER
    return [TOGETHER] * (steps // TOGETHER) + ([rest] if rest else [])


def _unit(scale: Tensor) -> Tensor:
    """Geometric means (G, 1) of a scale: the P-th root of its determinant."""
    diagonal = scale if scale.dim() == 2 else scale.diagonal(dim1=-2, dim2=-1)
    return diagonal.log().mean(-1, keepdim=True).exp()


def _search(state: SamplerState, tuning: Tuning) -> LengthSearch:
    """The search for the length as it stands."""
    known = state.adaptation.get("length")
    if known is None:
        return searching_from(there(tuning.length), state.draw.theta, len(tuning.scale))
    return LengthSearch(**known)


def _searched(
    search: LengthSearch,
    position: Tensor,
    sizes: tuple[Tensor, Tensor, Tensor],
    move: Tensor,
    velocity: Tensor,
    weight: Tensor,
    most: int,
) -> LengthSearch:
    """Take a step of the search, after proposals of so large a move from a position, each with a weight (C,)."""
    step_size, scale, length = sizes
    groups = len(scale)
    centre = search.centre.repeat_interleave(len(position) // groups, 0)
    slope = weight * length * chees_slopes(unspread(scale, position - centre), move, velocity)
    slope = shared(torch.where(torch.isfinite(slope), slope, 0.0), groups)
    step_size = shared(step_size, groups)
    return lengthened(search, slope, position, step_size, most * step_size)


def _carried(
    target: Potential,
    integrator: Integrator,
    start: Tensor,
    scale: Tensor,
    step_size: Tensor,
    place: Place,
    velocity: Tensor,
    gain: Tensor,
    steps: int,
) -> tuple[Place, Tensor, Tensor]:
    end, velocity, more = integrator(whitened(target, start, scale), place, velocity, step_size.unsqueeze(-1), steps)
    return end, velocity, gain + more


def _decided(
    energy: Energy, end: Place, last: Tensor, gain: Tensor, origin: Place, first: Tensor, uniform: Tensor
) -> tuple[Place, Move, Tensor, Tensor]:
    """Decide where a trajectory leads; also returns the move proposed, and the last velocity."""
    log_ratio = end.value - origin.value + gain
    after, accept = accepted(end, origin, log_ratio, uniform.log())
    divergent, none = finite_ratio(log_ratio) < -DIVERGENCE, torch.zeros_like(accept)
    return after, Move(accept, energy(origin, first, after), divergent, none, none), end.position, last
