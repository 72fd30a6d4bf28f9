"""E-steps of variational EM: a fit that goes on, chains that go on, complete runs."""

import dataclasses
import logging
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from posterity.errors import shown
from posterity.evidence.elbo import in_blocks
from posterity.evidence.m_steps import Expected
from posterity.inference.method import Info
from posterity.likelihoods import Gaussian as GaussianNoise
from posterity.likelihoods.likelihood import Likelihood
from posterity.methods.conjugate import Conjugate
from posterity.methods.full_rank import FullRank
from posterity.methods.laplace import Laplace, LaplaceState
from posterity.methods.low_rank_gaussian import LowRankGaussian
from posterity.methods.maximum_a_posteriori import MAP, MAPState
from posterity.methods.mean_field import MeanField
from posterity.methods.natural_gradient import NaturalGradient
from posterity.methods.parts.chains import Chains
from posterity.methods.parts.sampler import Sampler
from posterity.model import Batch, Data, Feed, Joint
from posterity.numerics.random import Key
from posterity.posteriors import Gaussian, Linearized, Posterior
from posterity.posteriors.samples import TOGETHER
from posterity.priors import Normal
from posterity.storage import leaves, mapped


def equal_stops(steps: int, burn_in: float, rounds: int) -> tuple[int, ...]:
    """Numbers of steps after which there is a pass: `rounds` at equal distances after a share `burn_in`, and the end.

    >>> equal_stops(100, 0.2, 4)
    (20, 40, 60, 80, 100)
    """
    first = max(1, math.ceil(burn_in * steps))
    return tuple(sorted({*(first + (steps - first) * k // rounds for k in range(rounds)), steps}))


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


def expected_sums(posterior: Posterior, batch: Batch, draws: int, key: Key) -> Expected:
    """The share of these rows in `Expected`, untempered, in float64; sums over all batches under one key are the whole.

    In closed form for a linearised posterior with Gaussian noise; else at as many draws of the weights, the same for
    all batches under this key.
    """
    joint, targets = posterior.joint.as_joint("VariationalEM"), batch.targets
    weights = torch.ones(batch.size, dtype=torch.float64, device=targets.device)
    weights = weights if batch.weights is None else batch.weights.double()
    with torch.no_grad():
        if isinstance(posterior, Linearized) and isinstance(joint.likelihood, GaussianNoise):
            return _in_closed_form(posterior, batch, weights)
        likelihood = posterior.likelihood(draws, key)
        if not isinstance(posterior, Gaussian):
            return _at(posterior.outputs(batch.inputs, draws, key), likelihood, targets, weights)
        found, step = [], max(1, TOGETHER // batch.size)
        for thetas in in_blocks(posterior.sample, draws, joint.num_weights, key):
            for some in torch.split(thetas, step):
                outputs = joint.outputs(some, batch.inputs, posterior.buffers or None)
                found.append(_at(outputs, likelihood, targets, weights))
        squares = torch.stack([each.squares * (len(each.log_likelihood) / draws) for each in found]).sum(0)
        return Expected(torch.cat([each.log_likelihood for each in found]), squares, weights.sum())


def added(first: Expected, second: Expected) -> Expected:
    """The sums over the rows of both."""
    return Expected(*(one + two for one, two in zip(first, second, strict=True)))


def _at(outputs: Tensor, likelihood: Likelihood, targets: Tensor, weights: Tensor) -> Expected:
    """From outputs (s, n, *event)."""
    outputs = outputs.double()
    log_likelihood = (likelihood.log_prob(outputs, targets) * weights).sum(-1)  # (s,)
    squares = outputs.new_zeros(0)
    if targets.is_floating_point() and targets.shape == outputs.shape[1:]:
        each = (targets - outputs).square().reshape(*outputs.shape[:2], -1)  # (s, n, E)
        squares = torch.einsum("sne,n->e", each, weights) / len(outputs)
    return Expected(log_likelihood, squares, weights.sum())


def _in_closed_form(posterior: Linearized, batch: Batch, weights: Tensor) -> Expected:
    likelihood = posterior.joint.as_joint("VariationalEM").likelihood
    mean, variance = posterior.output_moments(batch.inputs, marginal=True)
    mean, variance = mean.double(), variance.double().reshape(batch.size, -1)
    noise = likelihood.variance(mean).reshape(variance.shape)
    each = likelihood.log_prob(mean, batch.targets) - 0.5 * (variance / noise).sum(1)  # (n,)
    away = (batch.targets - mean).square().reshape(variance.shape) + variance  # (n, E)
    return Expected((weights @ each).reshape(1), weights @ away, weights.sum())


@dataclass(frozen=True)
class ContinuedFit(ExpectationRun):
    """One run of a method that improves step by step, which goes on while the problem changes."""

    method: Any  # with a number of steps
    burn_in: float
    rounds: int

    @cached_property
    def stops(self) -> tuple[int, ...]:  # type: ignore[override]
        return equal_stops(self.method.steps, self.burn_in, self.rounds)

    def steps(self, data: Data, key: Key) -> Feed:
        feed: Feed = self.method.batches(data, key)
        return feed

    def init(self, joint: Joint, theta: Tensor, key: Key) -> Any:
        return self.method.init(joint, theta, key)

    def step(self, joint: Joint, state: Any, done: int, batch: Batch, key: Key) -> tuple[Any, Info]:
        stepped: tuple[Any, Info] = self.method.step(joint, state, batch, key)
        return stepped

    def keep(self, state: Any) -> Any:
        return self.method.keep(state)

    def posterior(self, joint: Joint, state: Any) -> Posterior:
        found: Posterior = self.method.posterior(joint, [self.method.keep(state)])
        return found


class WindowState(NamedTuple):
    """The state of the chains, and what they kept since the last M-step: `kept` draws in tensors (W, ...)."""

    chains: Any
    window: dict[str, Tensor]
    kept: int


@dataclass(frozen=True)
class ContinuedChains(ExpectationRun):
    """Chains that go on while the problem changes; a posterior is what they have kept since it last did.

    Half of the draws belong to the rounds, in equal parts; the others are those of the last problem. The warm-up of
    samplers goes on through the rounds, so that their step size and mass are for the last problem, too.
    """

    method: Any  # a `Chains`
    rounds: int

    @cached_property
    def _kept_steps(self) -> list[int]:
        return sorted(self.method.kept_steps)

    @cached_property
    def stops(self) -> tuple[int, ...]:  # type: ignore[override]
        """After as many draws as belong to a round, and after the last one."""
        kept, half = self._kept_steps, len(self._kept_steps) // 2
        ends = {half * (k + 1) // self.rounds for k in range(self.rounds)} - {0}
        return tuple(kept[end - 1] for end in sorted(ends | {len(kept)}))

    @cached_property
    def _chains(self) -> Any:
        """The method whose warm-up ends with the last round."""
        method, half = self.method, len(self._kept_steps) // 2
        if not isinstance(method, Sampler) or not method.warmup or not half:
            return method
        changed: Any = method
        return dataclasses.replace(changed, warmup=method.warmup + half * method.thin, draws=method.draws - half)

    @cached_property
    def _room(self) -> int:
        """The most draws between two stops."""
        return len(self._kept_steps) - len(self._kept_steps) // 2

    def steps(self, data: Data, key: Key) -> Feed:
        return Feed(self.stops[-1], self._chains.batches(data, key).from_step)

    def init(self, joint: Joint, theta: Tensor, key: Key) -> WindowState:
        return WindowState(self._chains.init(joint, theta, key), {}, 0)

    def step(self, joint: Joint, state: WindowState, done: int, batch: Batch, key: Key) -> tuple[WindowState, Info]:
        """A step of all chains; the first after a stop begins with the density of the new problem."""
        chains, method = state.chains, self._chains
        if isinstance(method, Sampler) and done in self.stops:
            with torch.no_grad():
                chains = method.renewed(joint, chains, batch)
        chains, info = method.step(joint, chains, batch, key)
        state = state._replace(chains=chains)
        return (self._kept(state) if done + 1 in self.method.kept_steps else state), info

    def _kept(self, state: WindowState) -> WindowState:
        draw = leaves(self.method.keep(state.chains))
        window = state.window or {
            path: torch.zeros((self._room, *tensor.shape), dtype=tensor.dtype, device="cpu")
            for path, tensor in draw.items()
        }
        for path, tensor in draw.items():
            window[path][state.kept].copy_(tensor.detach())
        return state._replace(window=window, kept=state.kept + 1)

    def after_stop(self, state: WindowState) -> WindowState:
        return state._replace(kept=0)

    def posterior(self, joint: Joint, state: WindowState) -> Posterior:
        """Of the window, or of where the chains are while that is empty."""
        return _of_window(self.method, joint, state)

    def last_posterior(self, joint: Joint, state: WindowState) -> Posterior:
        """As that of a run with as many draws, so that bad chains are told of once the window is full."""
        return _of_window(dataclasses.replace(self.method, draws=self._room), joint, state)


def _of_window(method: Any, joint: Joint, state: WindowState) -> Posterior:
    now = method.keep(state.chains)
    rows = [_state(now, state.window, row) for row in range(state.kept)]
    found: Posterior = method.posterior(joint, rows or [now])
    return found


def _state(like: Any, window: dict[str, Tensor], row: int) -> Any:
    values = iter([window[path][row] for path in leaves(like)])
    return mapped(lambda _: next(values), like)


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
        if self.fit is None:
            return (0,) * (self.rounds + 1)
        return equal_stops(self.fit.steps, self.burn_in, self.rounds)

    def steps(self, data: Data, key: Key) -> Feed:
        return Feed(0, lambda start: iter(())) if self.fit is None else self.fit.batches(data, key)

    def at_stop(self, data: Data, key: Key) -> Feed:
        return self.method.batches(data, key)

    def init(self, joint: Joint, theta: Tensor, key: Key) -> WholeRunState:
        if isinstance(self.method, Laplace) and not isinstance(joint.bound_prior, Normal):
            logger.warning(
                "VariationalEM: of a prior that is not normal a Laplace approximation sees little or no curvature, and "
                "prior scales may run off. Use a normal prior, or MeanField for the E-step."
            )
        fit = None if self.fit is None else self.fit.init(joint, theta, key)
        return WholeRunState(self.method.init(joint, theta, key), fit, 0)

    def step(self, joint: Joint, state: WholeRunState, done: int, batch: Batch, key: Key) -> tuple[WholeRunState, Info]:
        assert self.fit is not None
        fit, info = self.fit.step(joint, state.fit, batch, key)  # type: ignore[arg-type]
        return state._replace(fit=fit), info

    def waits(self, joint: Joint, state: WholeRunState) -> bool:
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
        return state._replace(rows=0)

    def keep(self, state: WholeRunState) -> WholeRunState:
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
    return joint if state.fit is None else joint.with_buffers(state.fit.buffers)


__all__ = ["ExpectationRun", "expectation_run"]

_FITS = (MAP, MeanField, FullRank, LowRankGaussian, NaturalGradient)


def expectation_run(method: object, fit: object, burn_in: float, rounds: int) -> ExpectationRun:
    """The way in which the method serves; a one-line error where it cannot."""
    if fit is not None and not isinstance(fit, MAP):
        raise TypeError(f"VariationalEM.fit must be a MAP, or None. Got {shown(fit)}.")
    if isinstance(method, Laplace) and method.tuning is not None:
        raise ValueError(
            f"VariationalEM.expectation must leave hyper-parameters to the M-steps. Got Laplace with {method.tuning}. "
            "Use Laplace(tuning=None)."
        )
    if isinstance(method, (Conjugate, Laplace)):
        return WholeRuns(method, fit, burn_in, rounds)
    if not isinstance(method, (*_FITS, Chains)):
        hint = f" Call it: {method.__name__}()." if isinstance(method, type) else ""
        names = ", ".join(kind.__name__ for kind in (Conjugate, Laplace, *_FITS))
        raise TypeError(f"VariationalEM.expectation must be a sampler or one of {names}. Got {shown(method)}.{hint}")
    if fit is not None:
        raise ValueError(
            "VariationalEM.fit goes on between the runs of Laplace or Conjugate. "
            f"{type(method).__name__} has steps of its own. Leave it out."
        )
    return ContinuedChains(method, rounds) if isinstance(method, Chains) else ContinuedFit(method, burn_in, rounds)
