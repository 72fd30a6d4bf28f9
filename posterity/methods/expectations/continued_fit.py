"""E-steps that are parts of one fit."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from posterity.inference.method import Info
from posterity.methods.expectations.expectation_run import ExpectationRun
from posterity.methods.stops import equal_stops
from posterity.model.data import Batch, Data, Feed
from posterity.model.joint import Joint
from posterity.numerics.random import Key
from posterity.posteriors.posterior import Posterior


@dataclass(frozen=True)
class ContinuedFit(ExpectationRun):
    """One run of a method that improves step by step, which goes on while the problem changes."""

    method: Any  # with a number of steps
    burn_in: float
    rounds: int

    @cached_property
    def stops(self) -> tuple[int, ...]:  # type: ignore[override]
        """After the share `burn_in`, at equal distances."""
        return equal_stops(self.method.steps, self.burn_in, self.rounds)

    def steps(self, data: Data, key: Key) -> Feed:
        """Those of the method."""
        feed: Feed = self.method.batches(data, key)
        return feed

    def init(self, joint: Joint, theta: Tensor, key: Key) -> Any:
        """That of the method."""
        return self.method.init(joint, theta, key)

    def step(self, joint: Joint, state: Any, done: int, batch: Batch, key: Key) -> tuple[Any, Info]:
        """That of the method."""
        stepped: tuple[Any, Info] = self.method.step(joint, state, batch, key)
        return stepped

    def keep(self, state: Any) -> Any:
        """That of the method."""
        return self.method.keep(state)

    def posterior(self, joint: Joint, state: Any) -> Posterior:
        """Of the last state."""
        found: Posterior = self.method.posterior(joint, [self.method.keep(state)])
        return found
