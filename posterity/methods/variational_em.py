"""Variational EM: a method as E-step, hyper-parameters by M-steps."""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from posterity.errors import BadData, check_batch_size, fraction, positive, positive_whole
from posterity.evidence import Expected, MacKayUpdate, Maximisation
from posterity.evidence.elbo import LARGE
from posterity.inference.method import Footprint, Info, Method, Traits, theta_bytes
from posterity.inference.run import Trace
from posterity.methods.conjugate import Conjugate
from posterity.methods.laplace import Laplace
from posterity.methods.maximum_a_posteriori import MAP
from posterity.methods.parts.chains import Chains
from posterity.methods.parts.expectations import ExpectationRun, expectation_run, expected_sums
from posterity.methods.parts.rounds import E_STEP, Round, m_steps, refuse_fall, scales
from posterity.methods.parts.variational_fit import VariationalFit
from posterity.methods.parts.width_cost import measured_width_cost
from posterity.model import Joint, Problem
from posterity.model.data import Batch, Data, Feed, TensorData
from posterity.model.scales import as_chosen
from posterity.numerics.random import Key
from posterity.posteriors.posterior import Posterior
from posterity.storage import decode, encode

_PARTS = ("prior", "likelihood")
_FEWEST = 6  # rounds from which a limit of the bound is extrapolated
_STEEPEST = 0.99  # largest ratio of two gains in that
_NATS, _RELATIVE = 0.1, 0.005  # gaps below these are small; the second, of bounds from draws, is relative to them
_MOST = 16  # cached problems: the members of an ensemble step in turn

_Known = dict[tuple[str, tuple[float, ...]], Joint]
_KNOWN: "WeakKeyDictionary[Joint, _Known]" = WeakKeyDictionary()


class HyperParameters(NamedTuple):
    """Prior and likelihood as JSON with tensors; the text is "" while they are unchanged.

    `held` (H,), on the CPU, are parameters that the likelihood would learn along with the weights and the run holds.
    """

    text: str
    tensors: dict[str, Tensor]
    held: Tensor

    @classmethod
    def of(cls, joint: Joint, theta: Tensor, *, hold: bool) -> "HyperParameters":
        """The hyper-parameters of the problem; with `hold`, the likelihood's learnt parameters at theta (..., P)."""
        raw = joint.split(theta.reshape(-1, theta.shape[-1])[0])[1].detach().to("cpu", torch.float64)
        return cls("", {}, raw if hold else raw[:0])

    def moved(self, joint: Joint, new: Joint) -> "HyperParameters":
        """The hyper-parameters of `new`, which is the problem `joint` after M-steps; unchanged parts are left out."""
        known = _KNOWN.get(joint, {})
        known.pop(self._key, None)
        first, tensors = _first(joint, self.held), dict[str, Tensor]()
        config: dict[str, Any] = {
            name: encode(getattr(new, name), tensors, name)
            for name in _PARTS
            if getattr(new, name) is not getattr(first, name)
        }
        digest = hashlib.blake2b(digest_size=16)
        for name, tensor in tensors.items():
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return HyperParameters(json.dumps({"parts": config, "tensors": digest.hexdigest()}), tensors, self.held)

    def problem(self, joint: Joint) -> Joint:
        """The problem `joint` with these hyper-parameters: the same object for equal ones, while they are in use."""
        key, known = self._key, _KNOWN.setdefault(joint, {})
        if key not in known:
            first = _first(joint, self.held)
            parts = json.loads(self.text)["parts"] if self.text else {}
            values: dict[str, Any] = {name: decode(value, self.tensors) for name, value in parts.items()}
            known[key] = dataclasses.replace(first, **values) if values else first
            if len(known) > _MOST:
                del known[next(iter(known))]
        return known[key]

    @property
    def _key(self) -> tuple[str, tuple[float, ...]]:
        return self.text, tuple(self.held.tolist())


def _first(joint: Joint, held: Tensor) -> Joint:
    """The problem at the start of a run: another object, so that a cache entry of it does not keep it alive."""
    likelihood = joint.likelihood.fixed(held.to(joint.device)) if held.numel() else joint.likelihood
    return dataclasses.replace(joint, likelihood=likelihood)


Step: TypeAlias = Maximisation | Callable[[Joint, Posterior], Joint]

# The posterior of the present pass, which all its batches share, with the state it is made of; by problem, and by the
# problem with its present hyper-parameters.
_PASSES: "WeakKeyDictionary[Joint, dict[Joint, tuple[Any, Posterior]]]" = WeakKeyDictionary()


class VariationalEMState(NamedTuple):
    """State and number of the E-steps, the hyper-parameters, the sums of the present pass, and the bounds.

    `sums` are the fields of `Expected` over the `rows` seen, `bounds` the bounds of the last round. Draws of the passes
    are keyed by `seed` and the number of `rounds` done. `still`: whether the last round changed the bound by little.
    """

    expectation: Any
    hyper_parameters: HyperParameters
    sums: dict[str, Tensor]
    bounds: dict[str, Tensor]
    rows: int
    steps: int
    rounds: int
    seed: int
    still: bool


@dataclass(frozen=True)
class VariationalEM(Method):
    """Variational EM: a posterior by `expectation` whose prior and noise are moved by M-steps in between.

    **Math**: the bound F(q, h) = E_q log p(D | w, h) - KL(q || p(w | h)) <= log p(D | h) is raised in q by steps of
    `expectation`, and in the hyper-parameters h by the M-steps of `maximisation`, `rounds` times. An M-step is a
    `Maximisation` (`PriorScale`, `NoiseScale`, ...) or a function of (joint, posterior) that gives the joint with
    another prior or likelihood. Before each there is a pass over all rows, at `draws` draws of q that all its batches
    share (in closed form for `Conjugate`, and `Laplace` with Gaussian noise). The end has a pass, and no M-step.

    - `MAP`, `MeanField`, `FullRank`, `LowRankGaussian`, `NaturalGradient`: one run, in which the M-steps come at equal
      distances after a share `burn_in` of its steps; the optimiser keeps its state.
    - `Conjugate`, `Laplace`: each round is a complete run, for `Laplace` where `fit`, a MAP that continues in between,
      has come to. The run ends when the bound has changed by at most `tolerance` of itself in a round (None: never).
    - Samplers: after the warm-up the chains continue through all rounds. A round's posterior is what was kept since the
      last M-step. The rounds share the first half of the draws, while step size and mass keep adapting; the second
      half, at the last hyper-parameters, is what the posterior holds.

    The trace has for each round "bound" (for `Conjugate` and `Laplace` the log evidence, with what hyper-priors add;
    samples and points have "expected_log_joint" in its place), "bound_standard_error" where it is from draws,
    "expected_log_likelihood" E_q log p(D | w), and after the M-step "prior_scale" (T,), the standard deviation of each
    named tensor of weights under the prior, and "noise_scale". The fitted joint is `q.joint`. Noise that the likelihood
    learns is held and moved by the M-step, if there is one for it. At the end "bound_gap" extrapolates what is missing
    of the bound, in nats; if that is much, a warning says so. `rounds` left out are 20, or up to 200 of complete runs.

    **Limit**: a local maximum of the bound, the evidence itself where q is the exact posterior. There (`Conjugate`) an
    E- or M-step that lowers the bound is an error that names it; bounds from draws only tell. EM is slow where q is
    wide against the change that is wanted: `MacKayUpdate` is faster. A poor q has the hyper-parameters of its own
    bound: a factorised one may prefer a prior under which weights are not used, and large noise.

    **Cost**: the cost of `expectation`, and `rounds` + 1 passes of `draws` forward passes each.

    **References**: Neal and Hinton (1998), A view of the EM algorithm; MacKay (1992), Bayesian interpolation; Wei and
    Tanner (1990), A Monte Carlo implementation of the EM algorithm.

    **Example**:

    >>> import torch, posterity as po
    >>> from posterity.evidence import NoiseScale, PriorScale
    >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
    >>> y = 2 * x + 0.1 * torch.randn(40, 1, generator=torch.Generator().manual_seed(0))
    >>> joint = po.Joint(torch.nn.Linear(1, 1), po.likelihoods.Gaussian(scale=1.0), po.priors.Normal(), num_data=40)
    >>> em = po.methods.VariationalEM(po.methods.Conjugate(), (PriorScale(), NoiseScale()), rounds=50)
    >>> q, trace = po.infer(em, joint, (x, y))
    >>> round(q.joint.likelihood.scale, 1), bool((trace["bound"].diff() > -1e-4).all())
    (0.1, True)
    """

    expectation: Method
    maximisation: tuple[Step, ...]
    rounds: int | None = None
    burn_in: float = 0.2
    tolerance: float | None = 1e-8
    draws: int = 32
    fit: MAP | None = None
    batch_size: int | None = 1024

    def __post_init__(self) -> None:
        object.__setattr__(self, "maximisation", m_steps(self.maximisation))
        if self.rounds is not None:
            positive_whole("VariationalEM.rounds", self.rounds)
        fraction("VariationalEM.burn_in", self.burn_in)
        if self.tolerance is not None:
            positive("VariationalEM.tolerance", self.tolerance, "or None")
        self._run  # noqa: B018  refuse what cannot be an E-step now
        if not isinstance(self.expectation, Laplace) and any(isinstance(step, MacKayUpdate) for step in self._steps):
            raise ValueError(
                "VariationalEM: MacKayUpdate takes the posterior of Laplace. Got "
                f"{type(self.expectation).__name__}. Use Laplace(tuning=None), or PriorScale and NoiseScale."
            )
        positive_whole("VariationalEM.draws", self.draws)
        if self.draws < 2:
            raise ValueError("VariationalEM.draws must be at least 2, for a standard error. Got 1.")
        check_batch_size("VariationalEM.batch_size", self.batch_size)

    @cached_property
    def _run(self) -> ExpectationRun:
        return expectation_run(self.expectation, self.fit, self.burn_in, self._rounds)

    @property
    def _rounds(self) -> int:
        """Rounds, where they were left out: 20, or 200 of complete runs, which end where the bound stands still."""
        whole = isinstance(self.expectation, (Conjugate, Laplace)) and self.fit is None
        return (200 if whole and self.tolerance is not None else 20) if self.rounds is None else self.rounds

    def settled(self, joint: Problem, data: Data) -> "VariationalEM":
        """The fits are by a fixed number of steps, between which the M-steps change the problem."""
        own, fit = self.expectation, None if self.fit is None else self.fit.stepped(joint, data)
        expectation = own.stepped(joint, data) if isinstance(own, MAP) else own.settled(joint, data)
        return dataclasses.replace(self, expectation=expectation, fit=fit, rounds=self._rounds)

    def doubts(self, joint: Problem, trace: Trace) -> Sequence[str]:
        """Warn if the bound of the rounds still rises, and record the nats that are missing as "bound_gap"."""
        of_steps = self.expectation.doubts(joint, trace)
        if "bound" not in trace or len(trace["bound"]) < _FEWEST:
            return of_steps
        bound = trace["bound"]
        first, second = bound[-2] - bound[-3], bound[-1] - bound[-2]
        if not self._run.whole:  # noisy: thirds of the rounds in place of single ones
            parts = torch.tensor_split(bound, 3)
            first, second = (after.mean() - before.mean() for before, after in pairwise(parts))
        ratio = float(second / first) if float(first) > float(second) > 0.0 else float(second > 0.0)
        gap = float(second) * min(ratio, _STEEPEST) / (1.0 - min(ratio, _STEEPEST))
        error = trace["bound_standard_error"][-_FEWEST:].mean() if "bound_standard_error" in trace else 0.0
        trace.record(trace.last_step("bound"), {"bound_gap": gap})
        noise = 0.0 if self._run.whole else max(_RELATIVE * abs(float(bound[-1])), 3.0 * float(error))
        if gap <= max(_NATS, noise):
            return of_steps
        return [
            f"VariationalEM has not converged after {len(bound)} rounds: its bound still rises, and some {gap:.2g} "
            f"nats are missing at {float(bound[-1]):.5g}. Take more rounds, and more steps in a round."
        ]

    @property
    def _steps(self) -> tuple[Maximisation, ...]:
        return self.maximisation  # type: ignore[return-value]  # made so above

    @property
    def traits(self) -> Traits:
        own = self.expectation.traits
        return Traits(takes_members=False, anytime=own.anytime, row=own.row)

    def with_scales(self, joint: Joint, data: Data, start: Joint | None, key: Key) -> Joint:
        return as_chosen(joint, "M-steps")

    def prepared(self, joint: Problem, data: Data) -> Problem:
        problem = _one_problem(joint)
        if self._holds and getattr(problem.likelihood, "log_scale_prior", None) is not None:
            raise ValueError(
                "VariationalEM: the M-step for the noise has no use for log_scale_prior. Give NoiseScale a "
                "hyper_prior=Gamma(shape, rate) in its place, or leave the M-step out."
            )
        if isinstance(data, TensorData) and data.rows.per_member:
            raise BadData("VariationalEM fits one data set. Pass the rows of one member, without a member axis.")
        now = HyperParameters.of(problem, problem.initial(), hold=self._holds).problem(problem)
        ready = self.expectation.prepared(now, data).as_joint("VariationalEM")
        for step in self._steps:
            step.check(ready)
        return dataclasses.replace(ready, likelihood=problem.likelihood)

    def footprint(self, joint: Problem, data: Data) -> Footprint:
        own = self.expectation.footprint(joint, data)
        both = own if self.fit is None else own.larger(self.fit.footprint(joint, data))
        draws = {"draws of a pass": min(self.draws * theta_bytes(joint), LARGE * joint.dtype.itemsize)}
        words = f"VariationalEM of {self._rounds} rounds by {own.words}"
        return Footprint(words, {**both.parts, **draws}, own.predictions)

    def batches(self, data: Data, key: Key) -> Feed:
        """The batches of the method, with a pass over all rows in each round."""
        at_stop, rows = self._run.at_stop(data, key.fold("stops")), data.passes(self.batch_size)
        return self._run.steps(data, key).with_passes(at_stop.with_passes(rows, (len(at_stop),)), self._run.stops)

    def initial(self, joint: Problem, key: Key) -> Tensor:
        return self.expectation.initial(joint, key)

    def init(self, joint: Problem, theta: Tensor, key: Key) -> VariationalEMState:
        problem = _one_problem(joint)
        if theta.dim() > 1 and not isinstance(self.expectation, Chains):
            raise ValueError("VariationalEM fits one theta at a time. Use joint.member(i) for each member.")
        hyper_parameters = HyperParameters.of(problem, theta, hold=self._holds)
        now = hyper_parameters.problem(problem)
        state = self._run.init(now, theta[..., : now.size], key)
        return VariationalEMState(state, hyper_parameters, {}, {}, 0, 0, 0, key.seed, False)

    def step(
        self, joint: Problem, state: VariationalEMState, batch: Batch, key: Key
    ) -> tuple[VariationalEMState, Info]:
        """Step the method, or add a batch of a pass; at the end of the pass run the M-steps."""
        joint = joint.as_joint("VariationalEM")
        run, now = self._run, state.hyper_parameters.problem(joint)
        if state.steps < run.stops[state.rounds]:
            own = Key(state.seed).fold("steps").fold(state.steps)  # the same however many batches the passes have
            moved, info = run.step(now, state.expectation, state.steps, batch, own)
            return state._replace(expectation=moved, steps=state.steps + 1), info
        if run.waits(now, state.expectation):
            return state._replace(expectation=run.step_at_stop(now, state.expectation, batch, key)), {}
        posterior = self._in_pass(joint, now, state)
        sums = self._sums(now, posterior, batch, self._key(state))._asdict()
        if state.rows:
            sums = {name: state.sums[name] + value for name, value in sums.items()}
        state = state._replace(sums=sums, rows=state.rows + batch.size)
        if state.rows < now.num_data:
            return state, {}
        del _PASSES[joint][now]
        return self._at_stop(joint, now, posterior, state)

    def _sums(self, now: Joint, posterior: Posterior, batch: Batch, key: Key) -> Expected:
        """The expectations that these rows add, which several processes may share."""
        if (processes := now.network.sharing) is None:
            return expected_sums(posterior, batch, self.draws, key)

        def part(low: int, high: int) -> Expected:
            return expected_sums(posterior, batch.rows(low, high), self.draws, key)

        return Expected(*processes.total(part, batch.size))

    def _at_stop(
        self, joint: Joint, now: Joint, posterior: Posterior, state: VariationalEMState
    ) -> tuple[VariationalEMState, Info]:
        """Run the M-steps; none after the last stop, nor where the bound stands still, so that the posterior fits."""
        here = Round(self._steps, now, posterior, Expected(**state.sums), self._key(state), state.rounds + 1)
        exact, last = self._run.exact, state.rounds + 1 == len(self._run.stops)
        info, bounds, touching = here.bounds(), dict[str, Tensor](), here.exact(now) if exact else None
        if touching is not None:
            info["bound"] = touching  # the log evidence again, by a sum in which less cancels
            if "moved" in state.bounds:
                refuse_fall(now, E_STEP, here.number, state.bounds["moved"], touching)
        if self._run.whole:
            bounds["bound"] = info["bound"]
        before, bound, still = state.bounds.get("bound"), bounds.get("bound"), False
        if before is not None and bound is not None and self.tolerance is not None:
            still = abs(float(bound) - float(before)) <= self.tolerance * abs(float(bound))
        moved = now if last or still else here.moved(exact=exact)
        after = here.exact(moved) if exact else None
        if after is not None:
            bounds["moved"] = after
        info.update(scales(moved, posterior))
        hyper_parameters = state.hyper_parameters if moved is now else state.hyper_parameters.moved(joint, moved)
        return state._replace(
            expectation=state.expectation if last else self._run.after_stop(state.expectation),
            hyper_parameters=hyper_parameters,
            sums={},
            bounds=bounds,
            rows=0,
            rounds=state.rounds + 1,
            still=still,
        ), info

    def finished(self, state: VariationalEMState) -> str:
        return f"the bound stands still after {state.rounds} rounds" if state.still else ""

    def closing(self, joint: Problem, state: VariationalEMState, data: Data) -> Info:
        """Record what the width of a variational fit costs, and warn where it does harm."""
        if not isinstance(self.expectation, VariationalFit):
            return {}
        posterior = partial(self.posterior, joint, [self.keep(state)])
        return measured_width_cost("VariationalEM", joint, posterior, data, self.expectation.rows_seen(data))

    def keep(self, state: VariationalEMState) -> VariationalEMState:
        return state._replace(expectation=self._run.keep(state.expectation), sums={}, bounds={})

    def posterior(self, joint: Problem, kept: Sequence[VariationalEMState]) -> Posterior:
        now = kept[-1].hyper_parameters.problem(joint.as_joint("VariationalEM"))
        return self._run.last_posterior(now, kept[-1].expectation)

    @property
    def _holds(self) -> bool:
        """Whether an M-step moves the noise, which then is not learnt along with the weights."""
        return any(step.needs_residuals or (isinstance(step, MacKayUpdate) and step.noise) for step in self._steps)

    def _key(self, state: VariationalEMState) -> Key:
        """Key of the draws of a pass."""
        return Key(state.seed).fold("rounds").fold(state.rounds)

    def _in_pass(self, joint: Joint, now: Joint, state: VariationalEMState) -> Posterior:
        """The posterior of this pass, computed once."""
        known = _PASSES.setdefault(joint, {})
        if now not in known or known[now][0] is not state.expectation:
            known[now] = state.expectation, self._run.posterior(now, state.expectation)
        return known[now][1]


def _one_problem(problem: Problem) -> Joint:
    """The problem as a `Joint` without members."""
    joint = problem.as_joint("VariationalEM", "For a model of your own use ExpectationMaximization.")
    if joint.num_members is not None:
        raise ValueError(
            f"VariationalEM fits one problem. Got a Joint of {joint.num_members} members. Use joint.member(i) for each."
        )
    return joint
