"""E-steps of variational EM: a continued fit, continued chains, complete runs."""

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
from posterity.inference.method import GradientFit, Info, Method
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
from posterity.model.weights import entry_weights, weighted_log_prob
from posterity.numerics.random import Key
from posterity.posteriors import Gaussian, Linearized, Posterior
from posterity.posteriors.samples import TOGETHER
from posterity.priors import Normal
from posterity.storage import leaves, mapped

logger = logging.getLogger("posterity")


def equal_stops(steps: int, burn_in: float, rounds: int) -> tuple[int, ...]:
    """Steps after which there is a pass: `rounds` at equal distances after a share `burn_in`, and the end.

    >>> equal_stops(100, 0.2, 4)
    (20, 40, 60, 80, 100)
    """
    first = max(1, math.ceil(burn_in * steps))
    return tuple(sorted({*(first + (steps - first) * k // rounds for k in range(rounds)), steps}))


class ExpectationRun(ABC):
    """E-steps: `steps` between the stops, at each stop possibly a run over all rows, then a posterior.

    `joint` is always the problem at its present hyper-parameters.
    """

    whole: ClassVar[bool] = False
    """Whether each round is a complete run, whose bound does not vary with draws."""

    @cached_property
    @abstractmethod
    def stops(self) -> tuple[int, ...]:
        """Numbers of steps after which there is a round; the last is the end, and has no M-step."""

    @property
    def exact(self) -> bool:
        """Whether the posterior is the exact one, so that no E-step lowers the bound."""
        return False

    @abstractmethod
    def steps(self, data: Data, key: Key) -> Feed:
        """The batches of the steps, `stops[-1]` of them."""

    def at_stop(self, data: Data, key: Key) -> Feed:
        """The batches of the run at each stop; by default none."""
        return Feed(0, lambda start: iter(()))

    @abstractmethod
    def init(self, joint: Joint, theta: Tensor, key: Key) -> Any:
        """The state before the first step."""

    @abstractmethod
    def step(self, joint: Joint, state: Any, done: int, batch: Batch, key: Key) -> tuple[Any, Info]:
        """Step once, after `done` steps."""

    def waits(self, joint: Joint, state: Any) -> bool:
        """Whether the run at a stop needs more steps."""
        return False

    def step_at_stop(self, joint: Joint, state: Any, batch: Batch, key: Key) -> Any:
        """Step the run at a stop."""
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
        """The posterior at the end of a run, with the method's warnings."""
        return self.posterior(joint, state)


def expected_sums(posterior: Posterior, batch: Batch, draws: int, key: Key) -> Expected:
    """Untempered contribution of these rows to `Expected`, in float64; add it over all batches under one key.

    It is in closed form for a linearised posterior with Gaussian noise, else at `draws` draws of the weights, which are
    the same for all batches under this key.
    """
    joint, targets = posterior.joint.as_joint("VariationalEM"), batch.targets
    weights = entry_weights(joint.likelihood, batch, torch.float64)
    weights = torch.ones(batch.size, dtype=torch.float64, device=targets.device) if weights is None else weights
    with torch.no_grad():
        if isinstance(posterior, Linearized) and isinstance(joint.likelihood, GaussianNoise):
            mean, variance = posterior.output_moments(batch.inputs, marginal=True)
            mean, variance = mean.double(), variance.double().reshape(batch.size, -1)
            if weights.dim() > 1:
                log_likelihood = (joint.likelihood.expected_entry_log_prob(mean, variance, targets) * weights).sum()
            else:
                log_likelihood = weights @ joint.likelihood.expected_log_prob(mean, variance, targets)
            squares = _residuals(targets, mean).square().reshape(variance.shape) + variance  # (n, E)
            return Expected(log_likelihood.reshape(1), *_weighted(squares, weights))
        likelihood = posterior.likelihood(draws, key)
        if not isinstance(posterior, Gaussian):
            return _at(posterior.outputs(batch.inputs, draws, key), likelihood, targets, weights)
        parts = []
        for thetas in in_blocks(posterior.sample, draws, joint.num_weights, key):
            for chunk in torch.split(thetas, max(1, TOGETHER // batch.size)):
                outputs = joint.outputs(chunk, batch.inputs, posterior.buffers or None)
                parts.append(_at(outputs, likelihood, targets, weights))
        mean_squares = torch.stack([part.squares * (len(part.log_likelihood) / draws) for part in parts]).sum(0)
        return Expected(torch.cat([part.log_likelihood for part in parts]), mean_squares, parts[0].count)


def _at(outputs: Tensor, likelihood: Likelihood, targets: Tensor, weights: Tensor) -> Expected:
    """Contribution of rows with outputs (s, n, *event) at s draws."""
    outputs = outputs.double()
    log_likelihood = weighted_log_prob(likelihood, outputs, targets, weights).sum(-1)  # (s,)
    if not (targets.is_floating_point() and targets.shape == outputs.shape[1:]):
        return Expected(log_likelihood, outputs.new_zeros(0), weights.sum())
    each = _residuals(targets, outputs).square().reshape(*outputs.shape[:2], -1)  # (s, n, E)
    if weights.dim() > 1:
        return Expected(log_likelihood, *_weighted(each.mean(0), weights))
    return Expected(log_likelihood, torch.einsum("sne,n->e", each, weights) / len(outputs), weights.sum())


def _residuals(targets: Tensor, outputs: Tensor) -> Tensor:
    """y - f, 0 where the target is missing."""
    return torch.where(targets.isnan(), 0.0, targets - outputs)


def _weighted(squares: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Sums over rows (E,) of squares (n, E), and of the weights: (), or (E,) for weights (n, *entries)."""
    if weights.dim() == 1:
        return weights @ squares, weights.sum()
    weights = weights.reshape(squares.shape)
    return (weights * squares).sum(0), weights.sum(0)


@dataclass(frozen=True)
class ContinuedFit(ExpectationRun):
    """A run of a method that improves step by step and continues while the problem changes."""

    method: GradientFit
    burn_in: float
    rounds: int

    @cached_property
    def stops(self) -> tuple[int, ...]:
        return equal_stops(self.method.chosen("steps"), self.burn_in, self.rounds)

    def steps(self, data: Data, key: Key) -> Feed:
        return self.method.batches(data, key)

    def init(self, joint: Joint, theta: Tensor, key: Key) -> Any:
        return self.method.init(joint, theta, key)

    def step(self, joint: Joint, state: Any, done: int, batch: Batch, key: Key) -> tuple[Any, Info]:
        return self.method.step(joint, state, batch, key)

    def keep(self, state: Any) -> Any:
        return self.method.keep(state)

    def posterior(self, joint: Joint, state: Any) -> Posterior:
        return self.method.posterior(joint, [self.method.keep(state)])


class WindowState(NamedTuple):
    """The state of the chains, and the draws since the last M-step: `kept` of them in tensors (W, ...)."""

    chains: Any
    window: dict[str, Tensor]
    kept: int


@dataclass(frozen=True)
class ContinuedChains(ExpectationRun):
    """Chains that continue while the problem changes; a posterior holds the draws since the last change.

    Half of the draws belong to the rounds, in equal parts, and the others to the last problem. The warm-up of samplers
    lasts through the rounds, so that their step size and mass suit the last problem, too.
    """

    method: Any  # a `Chains`
    rounds: int

    @cached_property
    def _kept_steps(self) -> list[int]:
        return sorted(self.method.kept_steps)

    @cached_property
    def stops(self) -> tuple[int, ...]:
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
        """The largest number of draws between two stops."""
        return len(self._kept_steps) - len(self._kept_steps) // 2

    def steps(self, data: Data, key: Key) -> Feed:
        return Feed(self.stops[-1], self._chains.batches(data, key).from_step)

    def init(self, joint: Joint, theta: Tensor, key: Key) -> WindowState:
        return WindowState(self._chains.init(joint, theta, key), {}, 0)

    def step(self, joint: Joint, state: WindowState, done: int, batch: Batch, key: Key) -> tuple[WindowState, Info]:
        """Step all chains; the first step after a stop begins with the density of the new problem."""
        chains, method = state.chains, self._chains
        if isinstance(method, Sampler) and done in self.stops:
            with torch.no_grad():
                chains = method.renewed(joint, chains, batch)
        chains, info = method.step(joint, chains, batch, key)
        if done + 1 not in self.method.kept_steps:
            return state._replace(chains=chains), info
        draw = leaves(method.keep(chains))
        window = state.window or {
            path: torch.zeros((self._room, *tensor.shape), dtype=tensor.dtype, device="cpu")
            for path, tensor in draw.items()
        }
        for path, tensor in draw.items():
            window[path][state.kept].copy_(tensor.detach())
        return WindowState(chains, window, state.kept + 1), info

    def after_stop(self, state: WindowState) -> WindowState:
        return state._replace(kept=0)

    def posterior(self, joint: Joint, state: WindowState) -> Posterior:
        """The posterior of the window; while that is empty, of where the chains are."""
        return _window_posterior(self.method, joint, state)

    def last_posterior(self, joint: Joint, state: WindowState) -> Posterior:
        """The posterior of a run with as many draws as the window has room, so that a full one warns of bad chains."""
        return _window_posterior(dataclasses.replace(self.method, draws=self._room), joint, state)


def _window_posterior(method: Any, joint: Joint, state: WindowState) -> Posterior:
    now = method.keep(state.chains)
    values = iter([state.window[path][row] for row in range(state.kept) for path in leaves(now)])
    draws = [mapped(lambda _: next(values), now) for _ in range(state.kept)]
    posterior: Posterior = method.posterior(joint, draws or [now])
    return posterior


class WholeRunState(NamedTuple):
    """State of the method at this stop, after `rows` rows, and state of the fit, None without one."""

    method: Any
    fit: MAPState | None
    rows: int


@dataclass(frozen=True)
class WholeRuns(ExpectationRun):
    """A complete run of a method at each stop; in between, steps of a continued fit, if there is one."""

    whole: ClassVar[bool] = True
    method: Method  # Conjugate or Laplace
    fit: MAP | None
    burn_in: float
    rounds: int

    @property
    def exact(self) -> bool:
        """For linear models with Gaussian noise, if no fit moves weights that are points in between."""
        return isinstance(self.method, Conjugate) and self.fit is None

    @cached_property
    def stops(self) -> tuple[int, ...]:
        once = (0,) * (self.rounds + 1)
        return once if self.fit is None else equal_stops(self.fit.steps, self.burn_in, self.rounds)

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
        """Step the method, which begins at the theta of the fit, or at its own last one."""
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
        """The posterior of the method, without a warning that the weights are far from a mode."""
        method = state.method
        if isinstance(method, LaplaceState):
            method = method._replace(slopes=[slope[:0] for slope in method.slopes])
        return self.last_posterior(joint, state._replace(method=method))

    def last_posterior(self, joint: Joint, state: WholeRunState) -> Posterior:
        """The posterior of the method; before the first stop, where there is no curvature yet, of the fit."""
        if isinstance(state.method, LaplaceState) and not state.method.sums and self.fit is not None:
            return self.fit.posterior(joint, [state.fit])  # type: ignore[list-item]  # there is one with a fit
        return self.method.posterior(_at_fit(joint, state), [state.method])


def _at_fit(joint: Joint, state: WholeRunState) -> Joint:
    """The problem with the batch-norm statistics of the fit."""
    return joint if state.fit is None else joint.with_buffers(state.fit.buffers)


_FITS = (MAP, MeanField, FullRank, LowRankGaussian, NaturalGradient)


def expectation_run(method: object, fit: object, burn_in: float, rounds: int) -> ExpectationRun:
    """The E-steps by this method; raises an error where it cannot serve."""
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
