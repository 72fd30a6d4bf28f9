"""E-steps that are complete runs of a method over all rows."""

import logging
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from posterity.inference.method import Info
from posterity.methods.buffers import with_buffers
from posterity.methods.conjugate import Conjugate
from posterity.methods.expectations.expectation_run import ExpectationRun
from posterity.methods.laplace import Laplace, LaplaceState
from posterity.methods.maximum_a_posteriori import MAP, MAPState
from posterity.methods.stops import equal_stops
from posterity.model.data import Batch, Data, Feed
from posterity.model.joint import Joint
from posterity.numerics.random import Key
from posterity.posteriors.posterior import Posterior
from posterity.priors import Normal

logger = logging.getLogger("posterity")


class WholeRunState(NamedTuple):
    """The state of the method at this stop, after so many `rows`; that of the fit, None without one."""

    method: Any
    fit: MAPState | None
    rows: int


@dataclass(frozen=True)
class WholeRuns(ExpectationRun):
    """A complete run of a method at each stop; in between, steps of a fit that goes on, if there is one."""

    whole: ClassVar[bool] = True
    method: Conjugate | Laplace
    fit: MAP | None
    burn_in: float
    rounds: int

    @property
    def exact(self) -> bool:  # type: ignore[override]
        """For linear models with Gaussian noise, if no fit moves weights that are points in between."""
        return isinstance(self.method, Conjugate) and self.fit is None

    @cached_property
    def stops(self) -> tuple[int, ...]:  # type: ignore[override]
        """Those of the fit; without one all come at once."""
        if self.fit is None:
            return (0,) * (self.rounds + 1)
        return equal_stops(self.fit.steps, self.burn_in, self.rounds)

    def steps(self, data: Data, key: Key) -> Feed:
        """Those of the fit."""
        return Feed(0, lambda start: iter(())) if self.fit is None else self.fit.batches(data, key)

    def at_stop(self, data: Data, key: Key) -> Feed:
        """Those of the method."""
        return self.method.batches(data, key)

    def init(self, joint: Joint, theta: Tensor, key: Key) -> WholeRunState:
        """The method and the fit at theta."""
        if isinstance(self.method, Laplace) and not isinstance(joint.bound_prior, Normal):
            logger.warning(
                "VariationalEM: of a prior that is not normal a Laplace approximation sees little or no curvature, and "
                "prior scales may run off. Use a normal prior, or MeanField for the E-step."
            )
        fit = None if self.fit is None else self.fit.init(joint, theta, key)
        return WholeRunState(self.method.init(joint, theta, key), fit, 0)

    def step(self, joint: Joint, state: WholeRunState, done: int, batch: Batch, key: Key) -> tuple[WholeRunState, Info]:
        """One of the fit."""
        assert self.fit is not None
        fit, info = self.fit.step(joint, state.fit, batch, key)  # type: ignore[arg-type]
        return state._replace(fit=fit), info

    def waits(self, joint: Joint, state: WholeRunState) -> bool:
        """Until it has seen all rows as often as it wants."""
        passes = self.method.passes if isinstance(self.method, Laplace) else 1
        return state.rows < passes * joint.num_data

    def step_at_stop(self, joint: Joint, state: WholeRunState, batch: Batch, key: Key) -> WholeRunState:
        """A step of the method, which begins where the fit is, or where it was the last time."""
        problem, method = _at_fit(joint, state), state.method
        if not state.rows:
            method = self.method.init(problem, method.theta if state.fit is None else state.fit.theta, key)
        method, _ = self.method.step(problem, method, batch, key)
        return state._replace(method=method, rows=state.rows + batch.size)

    def after_stop(self, state: WholeRunState) -> WholeRunState:
        """To begin anew."""
        return state._replace(rows=0)

    def keep(self, state: WholeRunState) -> WholeRunState:
        """Without the moments of the optimiser."""
        return state if self.fit is None or state.fit is None else state._replace(fit=self.fit.keep(state.fit))

    def posterior(self, joint: Joint, state: WholeRunState) -> Posterior:
        """That of the method; while the fit goes on, nobody asks how far it is from a mode."""
        method = state.method
        if isinstance(method, LaplaceState):
            method = method._replace(slopes=[slope[:0] for slope in method.slopes])
        return self.last_posterior(joint, state._replace(method=method))

    def last_posterior(self, joint: Joint, state: WholeRunState) -> Posterior:
        """That of the method; that of the fit before the first stop, where there is no curvature yet."""
        if isinstance(state.method, LaplaceState) and not state.method.sums and self.fit is not None:
            return self.fit.posterior(joint, [state.fit])  # type: ignore[list-item]  # there is one with a fit
        return self.method.posterior(_at_fit(joint, state), [state.method])


def _at_fit(joint: Joint, state: WholeRunState) -> Joint:
    """The problem with the batch-norm statistics of the fit."""
    return joint if state.fit is None else with_buffers(joint, state.fit.buffers)
