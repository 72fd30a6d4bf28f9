"""Adaptation of a sampler: step size and mass matrix, learnt in its first transitions and then held."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from posterity.kernels.dual_averaging import DualAveraging, averaged, averaging_from
from posterity.kernels.mass import Mass
from posterity.kernels.windows import Moments, no_moments, windows, with_positions

LEAST = 0.1  # a probability of acceptance below this counts as this, lest one chain speak for all


class Tuning(NamedTuple):
    """What the transitions of chains are made with: step sizes (C,), and scales (G, P) or (G, P, P) of groups."""

    step_size: Tensor
    scale: Tensor


class Adaptation(NamedTuple):
    """What a warm-up has learnt so far."""

    search: DualAveraging
    moments: Moments

    def tables(self) -> dict[str, dict[str, Tensor]]:
        """As a state of a run holds it, which may do without."""
        return {"search": self.search._asdict(), "moments": self.moments._asdict()}

    @classmethod
    def of(cls, tables: dict[str, dict[str, Tensor]]) -> "Adaptation":
        """What `tables` gave."""
        return cls(DualAveraging(**tables["search"]), Moments(**tables["moments"]))


@dataclass(frozen=True)
class Warmup:
    """The schedule of a warm-up of `steps` transitions: the step size all the time, the mass matrix in windows.

    `accept` is the wanted probability of acceptance, None where the step size is held. Chains that learn together reach
    it on average, or, where `cautious`, in the harmonic mean, which hears those that accept less than others (Hoffman
    and Sountsov, 2022). `mass` says what is learnt of the scales. Chains of one problem, a group, learn together, but
    for the step size until the last mass matrix is made: a chain that starts where the density is steep gets away
    with small steps of its own only, and would not be heard among many.
    """

    steps: int
    accept: float | None
    mass: Mass
    cautious: bool = False

    def begun(self, tuning: Tuning) -> Adaptation:
        """Nothing learnt yet."""
        return Adaptation(averaging_from(tuning.step_size), no_moments(tuning.scale))

    def learnt(
        self, adaptation: Adaptation, tuning: Tuning, step: int, theta: Tensor, accept: Tensor
    ) -> tuple[Adaptation, Tuning, bool]:
        """What is known after transition `step` (from 0), which led to theta (C, P); and whether the scale changed.

        Where it has changed, the step size is to be found anew: see `begun`.
        """
        groups = tuning.scale.shape[0]
        first, ends = windows(self.steps, len(theta) // groups)
        together = step >= (ends[-1] if ends else 0)
        search, moments = adaptation
        if self.accept is not None:
            rate = accept
            if together and self.cautious and groups < len(accept):
                rate = 1.0 / shared(1.0 / accept.clamp(min=LEAST), groups)
            elif together:
                rate = shared(accept, groups)
            search = averaged(search, rate, self.accept)
            tuning = tuning._replace(step_size=search.log_step.exp())
        changed = step + 1 in ends
        if self.mass.learns and first <= step < (ends[-1] if ends else 0):
            moments = with_positions(moments, theta)
            if changed:
                tuning = tuning._replace(scale=self.mass.scale(moments))
        if step + 1 == self.steps and self.accept is not None:
            tuning = tuning._replace(step_size=search.average.exp())
        return Adaptation(search, moments), tuning, changed


def shared(values: Tensor, groups: int) -> Tensor:
    """For each chain the mean over its group of values (C,).

    >>> import torch
    >>> shared(torch.tensor([1.0, 3.0, 4.0, 6.0]), groups=2)
    tensor([2., 2., 5., 5.])
    """
    rows = values.reshape(groups, -1)
    return rows.mean(1, keepdim=True).expand_as(rows).reshape(-1)
