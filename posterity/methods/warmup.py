"""Adaptation of a sampler: step size and mass matrix, learnt in its first transitions and then held."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from posterity.kernels.dual_averaging import DualAveraging, averaged, averaging_from
from posterity.kernels.mass import Mass
from posterity.kernels.windows import Moments, no_moments, windows, with_positions


class Tuning(NamedTuple):
    """What the transitions of a chain are made with: step sizes (G,), and scales (G, P) or (G, P, P)."""

    step_size: Tensor
    scale: Tensor


class Adaptation(NamedTuple):
    """What a warm-up has learnt so far."""

    search: DualAveraging
    moments: Moments


@dataclass(frozen=True)
class Warmup:
    """The schedule of a warm-up of `steps` transitions: the step size all the time, the mass matrix in windows.

    `accept` is the wanted probability of acceptance, None where the step size is held; `mass` says what is learnt of
    the scales. Chains of one problem learn together, chains of different problems each for itself.
    """

    steps: int
    accept: float | None
    mass: Mass

    def begun(self, tuning: Tuning) -> Adaptation:
        """Nothing learnt yet."""
        return Adaptation(averaging_from(tuning.step_size), no_moments(tuning.scale))

    def learnt(
        self, adaptation: Adaptation, tuning: Tuning, step: int, theta: Tensor, accept: Tensor
    ) -> tuple[Adaptation, Tuning, bool]:
        """What is known after transition `step` (from 0), which led to theta (C, P); and whether the scale changed."""
        groups = tuning.step_size.shape[0]
        search, moments = adaptation
        if self.accept is not None:
            search = averaged(search, accept.reshape(groups, -1).mean(1), self.accept)
            tuning = tuning._replace(step_size=search.log_step.exp())
        changed = False
        if self.mass.learns:
            first, ends = windows(self.steps)
            if first <= step < (ends[-1] if ends else 0):
                moments = with_positions(moments, theta)
            changed = step + 1 in ends
            if changed:
                tuning = tuning._replace(scale=self.mass.scale(moments))
                moments = no_moments(tuning.scale)
                search = averaging_from(tuning.step_size)
        if step + 1 == self.steps and self.accept is not None:
            tuning = tuning._replace(step_size=search.average.exp())
        return Adaptation(search, moments), tuning, changed
