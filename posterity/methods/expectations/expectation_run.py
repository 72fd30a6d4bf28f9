"""How a method serves as the E-step of variational EM: what it does between two M-steps, and its posterior there."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from torch import Tensor

from posterity.inference.method import Info
from posterity.model.data import Batch, Data, Feed
from posterity.model.joint import Joint
from posterity.numerics.random import Key
from posterity.posteriors.posterior import Posterior


class ExpectationRun(ABC):
    """E-steps: `steps` between the stops, then at each stop perhaps a run over all rows, then a posterior.

    `joint` is always the problem at its present hyper-parameters.
    """

    # Numbers of steps after which there is a round; the last is the end, and has no M-step.
    stops: tuple[int, ...]
    # Whether each round is a complete run, whose bound does not vary with draws.
    whole: ClassVar[bool] = False
    # Whether the posterior is the exact one, so that no E-step lowers the bound.
    exact: bool = False

    @abstractmethod
    def steps(self, data: Data, key: Key) -> Feed:
        """The batches of the steps, `stops[-1]` of them."""

    def at_stop(self, data: Data, key: Key) -> Feed:
        """The batches of the run at each stop: by default none."""
        return Feed(0, lambda start: iter(()))

    @abstractmethod
    def init(self, joint: Joint, theta: Tensor, key: Key) -> Any:
        """The state before the first step."""

    @abstractmethod
    def step(self, joint: Joint, state: Any, done: int, batch: Batch, key: Key) -> tuple[Any, Info]:
        """A step, after as many as are `done`."""

    def waits(self, joint: Joint, state: Any) -> bool:
        """Whether the run at a stop has not ended yet."""
        return False

    def step_at_stop(self, joint: Joint, state: Any, batch: Batch, key: Key) -> Any:
        """A step of the run at a stop."""
        raise AssertionError("there is no run at a stop")

    def after_stop(self, state: Any) -> Any:
        """The state with which the next round begins."""
        return state

    def keep(self, state: Any) -> Any:
        """The part of a state that the posterior needs."""
        return state

    @abstractmethod
    def posterior(self, joint: Joint, state: Any) -> Posterior:
        """The posterior at the present hyper-parameters."""

    def last_posterior(self, joint: Joint, state: Any) -> Posterior:
        """That of the end of a run, with what a method has to say of it."""
        return self.posterior(joint, state)
