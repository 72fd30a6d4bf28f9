"""Marginal-likelihood training: prior precision and noise are tuned while the weights are trained."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from posterity.curvature import Kronecker
from posterity.errors import fraction, of_kinds, positive_whole, shown
from posterity.evidence import Groups, Marginal, Shared, Tuned, Tuning, present_precision, tuned_joint
from posterity.evidence.marginal import grouped
from posterity.evidence.tuning import automatic
from posterity.inference.method import Footprint, Info, Method, Traits
from posterity.likelihoods import Gaussian
from posterity.methods.laplace import Laplace, LaplaceState
from posterity.methods.maximum_a_posteriori import MAP, MAPState
from posterity.methods.parts.expectations import equal_stops
from posterity.methods.parts.gaussian_at_mode import prior_precision
from posterity.methods.parts.subset import AllWeights, KnownCurvature
from posterity.model import Batch, Data, Feed, Joint, Problem
from posterity.numerics.random import Key
from posterity.optim import LBFGS
from posterity.posteriors import Linearized, Posterior
from posterity.priors import Normal

EVALUATIONS = 100  # of the log density in each round of a search

# The problem at its latest hyper-parameters, which many steps share.
_latest: "WeakKeyDictionary[Joint, tuple[str, Joint]]" = WeakKeyDictionary()


class OnlineLaplaceState(NamedTuple):
    """States of the fit and of the passes for the curvature, number of stops done, and the hyper-parameters."""

    fit: MAPState
    laplace: LaplaceState
    stops: int
    prior_precision: Tensor  # (G,), on the CPU
    noise_scale: Tensor  # (), on the CPU; zero where the noise is not tuned


@dataclass(frozen=True)
class OnlineLaplace(Method):
    """Marginal-likelihood training: a fit by `fit` whose prior precision and noise follow the Laplace evidence.

    **Math**: theta climbs log p(D | theta, noise) + log p(theta | alpha) by the steps of `fit`. After a share
    `burn_in` of them, and `rounds` times in all at equal distances, a pass over the data adds up the curvature at the
    present theta, and `tuning` moves alpha and the noise to the maximum of the log evidence there. A last pass, at
    the end, makes the posterior of `laplace` at the last hyper-parameters; where it surely predicts worse than theta
    alone, at a smaller prior scale, as `Laplace` says. The trace has the "log_evidence" of each pass, before the
    change, and "prior_precision" (G,) and "noise_scale" after it. By default (None) `tuning` moves what was left out,
    one prior precision for each layer and the noise, and nothing that was given.

    **Limit**: for a linear model the fixed point is the maximum of the exact evidence over the hyper-parameters. For
    networks the curvature is taken as constant in theta while alpha and the noise move. A learnt noise of one
    scale is tuned here instead of being fitted along with the weights.

    **Cost**: the fit, and `rounds` + 1 passes of `laplace`.

    **References**: Immer et al. (2021), Scalable marginal likelihood estimation for model selection in deep learning,
    Algorithm 1.

    **Example**:

    >>> import posterity as po
    >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
    >>> y = 2 * x + 0.1 * torch.randn(40, 1, generator=torch.Generator().manual_seed(0))
    >>> joint = po.Joint(torch.nn.Linear(1, 1), po.likelihoods.Gaussian(), po.priors.Normal(), num_data=40)
    >>> fit = po.methods.MAP(steps=1000, batch_size=None, optimizer=po.optim.Adam(0.02))
    >>> q, trace = po.infer(po.methods.OnlineLaplace(fit), joint, (x, y))
    >>> round(q.joint.likelihood.scale, 1)
    0.1
    """

    fit: MAP = field(default_factory=lambda: MAP())
    laplace: Laplace = field(default_factory=lambda: Laplace(structure=Kronecker()))
    tuning: Tuning | None = None
    rounds: int = 20
    burn_in: float = 0.2

    def __post_init__(self) -> None:
        of_kinds(self, fit=MAP, laplace=Laplace)
        if self.tuning is not None:
            of_kinds(self, tuning=Tuning)
        positive_whole("OnlineLaplace.rounds", self.rounds)
        fraction("OnlineLaplace.burn_in", self.burn_in)

    @property
    def traits(self) -> Traits:
        return Traits(takes_members=False, anytime=False)

    @property
    def stops(self) -> tuple[int, ...]:
        """Steps of the fit after which there is a pass; the last is its end."""
        return equal_stops(self.fit.steps, self.burn_in, self.rounds)

    def with_scales(self, joint: Joint, data: Data, start: Joint | None, key: Key) -> Joint:
        return joint  # they are chosen during the fit

    def settled(self, joint: Problem, data: Data) -> "OnlineLaplace":
        """A fit that would search for a mode by `LBFGS` has 100 evaluations between the passes, and as many before."""
        given: object = self.fit.optimizer
        search = self.fit.settled(joint, data) if given is None else self.fit
        laplace = self.laplace
        if isinstance(laplace.subset, KnownCurvature):  # the prior of every weight is tuned
            laplace = dataclasses.replace(laplace, subset=AllWeights())
        if given is None and isinstance(search.optimizer, LBFGS):
            fit = dataclasses.replace(search, steps=EVALUATIONS * (self.rounds + 1))
        else:
            fit = self.fit.stepped(joint, data)
        return dataclasses.replace(self, fit=fit, laplace=laplace)

    def prepared(self, joint: Problem, data: Data) -> Problem:
        return self.laplace.prepared(joint, data)

    def footprint(self, joint: Problem, data: Data) -> Footprint:
        laplace = self.laplace.footprint(joint, data)
        parts = self.fit.footprint(joint, data).larger(laplace).parts
        return Footprint(super().footprint(joint, data).words, parts, laplace.predictions)

    def batches(self, data: Data, key: Key) -> Feed:
        """The batches of the fit, with a pass over all rows at each stop."""
        return self.fit.batches(data, key).with_passes(self.laplace.batches(data, key.fold("passes")), self.stops)

    def init(self, joint: Problem, theta: Tensor, key: Key) -> OnlineLaplaceState:
        joint = joint.as_joint("OnlineLaplace", "Use Laplace.")
        tuning = self._tuning(joint)
        if tuning is not None and not isinstance(joint.bound_prior, Normal):
            raise ValueError(f"OnlineLaplace tunes a Joint with a Normal prior. Got {shown(joint.prior)}. Use Laplace.")
        if theta.dim() > 1:
            raise ValueError("OnlineLaplace trains one theta at a time. Use joint.member(i) for each member.")
        alpha = torch.zeros(0, dtype=torch.float64, device="cpu")
        if tuning is not None:
            alpha = present_precision(joint, tuning.groups).cpu()
        noise, likelihood = torch.zeros((), dtype=torch.float64, device="cpu"), joint.fitted(theta).likelihood
        if tuning is not None and tuning.noise and isinstance(likelihood, Gaussian):
            scale = torch.as_tensor(likelihood.scale, dtype=torch.float64).detach().cpu()
            noise = scale.reshape(()).clone() if scale.numel() == 1 else noise
        now = self._now(joint, alpha, noise)
        fit = self.fit.init(now, theta[: now.size], key)
        laplace = self.laplace.init(now, fit.theta, key)
        return OnlineLaplaceState(fit, laplace, 0, alpha, noise)

    def step(
        self, joint: Problem, state: OnlineLaplaceState, batch: Batch, key: Key
    ) -> tuple[OnlineLaplaceState, Info]:
        """Step the fit, or add a batch to the pass for the curvature."""
        joint = joint.as_joint("OnlineLaplace")
        now = self._now(joint, state.prior_precision, state.noise_scale)
        if state.fit.step < self.stops[state.stops]:
            fit, info = self.fit.step(now, state.fit, batch, key)
            return state._replace(fit=fit), info
        now = now.with_buffers(state.fit.buffers)
        begun = state.laplace.passes < self.laplace.passes and (state.laplace.rows or state.laplace.passes)
        laplace = state.laplace if begun else self.laplace.init(now, state.fit.theta, key)
        laplace, _ = self.laplace.step(now, laplace, batch, key)
        state = state._replace(laplace=laplace)
        return self._at_stop(joint, now, state) if laplace.passes == self.laplace.passes else (state, {})

    def closing(self, joint: Problem, state: OnlineLaplaceState, data: Data) -> Info:
        now = self._now(joint.as_joint("OnlineLaplace"), state.prior_precision, state.noise_scale)
        return self.fit.closing(now, state.fit, data)

    def keep(self, state: OnlineLaplaceState) -> OnlineLaplaceState:
        return state._replace(fit=self.fit.keep(state.fit))

    def posterior(self, joint: Problem, kept: Sequence[OnlineLaplaceState]) -> Posterior:
        last = kept[-1]
        joint = joint.as_joint("OnlineLaplace")
        now = self._now(joint, last.prior_precision, last.noise_scale)
        posterior = self.laplace.posterior(now.with_buffers(last.fit.buffers), [last.laplace])
        return self.laplace.predictive(posterior, joint) if isinstance(posterior, Linearized) else posterior

    def _at_stop(self, joint: Joint, now: Joint, state: OnlineLaplaceState) -> tuple[OnlineLaplaceState, Info]:
        """Tune the hyper-parameters at a stop; at the last one they stay, since theta is a fit to them."""
        tuning = self._tuning(joint)
        marginal = self._marginal(joint, now, state, Shared() if tuning is None else tuning.groups)
        info: dict[str, Tensor | float] = {"log_evidence": marginal.log_evidence()}
        if tuning is None:
            return state._replace(stops=state.stops + 1), info
        if state.stops + 1 < len(self.stops):
            tuned = tuning.tune(marginal)
            noise = torch.full_like(state.noise_scale, tuned.noise_scale or 0.0)
            state = state._replace(prior_precision=tuned.prior_precision.cpu(), noise_scale=noise)
            if isinstance(self.fit.optimizer, LBFGS):  # its pairs are of the problem as it was
                fit = state.fit._replace(optimizer=self.fit.optimizer.init(state.fit.theta))
                state = state._replace(fit=fit)
        info["prior_precision"] = state.prior_precision
        if float(state.noise_scale):
            info["noise_scale"] = state.noise_scale
        return state._replace(stops=state.stops + 1), info

    def _tuning(self, joint: Joint) -> Tuning | None:
        return automatic(joint) if self.tuning is None else self.tuning

    def _marginal(self, joint: Joint, now: Joint, state: OnlineLaplaceState, groups: Groups) -> Marginal:
        """The evidence at a stop, with the declared prior of a learnt noise."""
        theta, laplace = state.fit.theta, state.laplace
        problem = now.narrowed(laplace.chosen)
        structure = self.laplace.structure_for(problem)
        precision = structure.precision(laplace.sums[0], laplace.places, 1.0, prior_precision(problem, theta))
        if problem.size < joint.size:  # the noise is declared as learnt, so that it may have a prior
            problem = dataclasses.replace(problem, likelihood=joint.likelihood)
            theta = torch.cat([theta.to(torch.float64), state.noise_scale.log().to(theta.device).reshape(1)])
        log_likelihood, residuals = laplace.data[0, 0], laplace.data[0, 1:] if float(state.noise_scale) else None
        return Marginal.of(problem, theta, precision, log_likelihood, residuals, groups)

    def _now(self, joint: Joint, prior_precision: Tensor, noise_scale: Tensor) -> Joint:
        """The joint at these hyper-parameters; tuned noise is not learnt."""
        tuning = self._tuning(joint)
        if tuning is None:
            return joint
        groups, noise = tuning.groups, float(noise_scale)
        key = repr((groups, (*prior_precision.tolist(), noise)))
        if joint not in _latest or _latest[joint][0] != key:
            tuned = Tuned(groups, grouped(joint, groups)[0], prior_precision, noise or None, math.nan, math.nan, 0)
            _latest[joint] = key, tuned_joint(joint, tuned)
        return _latest[joint][1]
