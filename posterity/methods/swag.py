"""SWAG: a Gaussian from the moments of the weights along a run of gradient steps."""

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from posterity.errors import positive, positive_whole, shown, whole
from posterity.inference.memory import fit_bytes
from posterity.inference.method import Footprint, Info, Method, Traits, theta_bytes
from posterity.methods.maximum_a_posteriori import MAP, MAPState
from posterity.methods.parts.gradient_runs import SETTLED_LATER, batches_in_pass, risen, usual_rate
from posterity.methods.parts.width_cost import measured_width_cost
from posterity.model import Buffers, Joint, Problem
from posterity.model.data import Batch, Data, Feed, StreamData
from posterity.model.module import named_weights
from posterity.model.problem import data_of
from posterity.numerics.random import Key
from posterity.optim import Constant, StationarySGD
from posterity.posteriors.gaussian import Gaussian
from posterity.posteriors.point import problem_of
from posterity.precisions import Diagonal, LowRankCovariance, Precision

if TYPE_CHECKING:
    from posterity.inference.run import Trace

logger = logging.getLogger("posterity")

_LEAST_ROWS, _MOST_ROWS, _BATCHES = 4, 128, 32  # of a batch, and batches in a pass where rows are few
_PASSES, _LEAST_STEPS, _MOST_STEPS, _COLLECTED = 40, 1000, 10_000, 100  # after the warm-up, which has twice as many
_EVERY = 20  # steps between collected thetas of a fit that is given
_LEAST = 1e-30  # variance of a weight that never moved: too small to matter in a draw, enough for a density


class SWAGState(NamedTuple):
    """The state of the fit and the moments of the thetas collected so far; (M, ...) for members.

    `mean` (T,) and `squares` (R,), the sum of squared distances to it, are in float64; `deviations` (K, R) are a ring.
    `statistics` are the batch-norm statistics at the mean, averaged over `batches` of the last pass. `start` is the
    theta that the run began at; kept states do without.
    """

    fit: MAPState
    mean: Tensor
    squares: Tensor
    deviations: Tensor
    collected: int
    statistics: Buffers
    batches: int
    start: Tensor | None = None


@dataclass(frozen=True)
class SWAG(Method):
    """Stochastic weight averaging, Gaussian: the mean and covariance of the weights that training wanders through.

    **Math**: the steps of `fit`, mostly SGD at a constant or cyclic step size from a MAP start; after the first
    `warmup` of them theta is collected `every` so many. With the running mean m_i of the first i thetas, the final mean
    m, the diagonal v = E[theta^2] - m^2 and the matrix D of the last K = `rank` deviations theta_i - m_i,
    q = N(m, scale^2 (diag(v) + D D^T / (K - 1)) / 2), drawn as m + scale (v^1/2 eps + D z / (K - 1)^1/2) / 2^1/2. Of
    rank 0 (SWAG-diagonal) q = N(m, scale^2 diag(v)). `scale` multiplies the standard deviations; 1 is the paper's.

    **Defaults**: without a `fit` the steps are those of `optim.StationarySGD`, whose sizes follow from the gradients,
    so that it wanders as far as the posterior is wide. 100 thetas are collected, or `rank` if that is more, in 40
    passes over the data (at least 1,000 steps, at most 10,000), after a `warmup` of twice as many steps that begins
    with a search for a mode, which hardly moves where the start is at one. A batch has a 32nd of the rows, at least 4
    and at most 128, and at most half of them: all rows have no noise. With a `fit`, theta is collected every 20 steps
    without a warm-up.

    **Elsewhere**: `from_checkpoints` makes the same of the state dicts that another training loop has stored.

    **Limit**: says how far SGD wanders at its step size, which for a quadratic bowl and a well chosen one is the width
    of the posterior; with a `fit` of your own it is not calibrated by itself. Weights that the prior alone decides
    hardly wander, as it has no noise. Steps of Adam have no such reading. Weights outside `joint.random`, and learnt
    parameters of the likelihood, stay at their means. Batch norm: its statistics at the mean are recomputed by one pass
    over the data after the fit, and serve all draws (the paper has one pass a draw).

    **Cost**: the fit and one pass over the data, which without batch norm only reads them; (`rank` + 5) times
    the size of theta in memory.

    **References**: Maddox et al. (2019), A simple baseline for Bayesian uncertainty in deep learning, section 3 and
    Algorithm 1; Izmailov et al. (2018), Averaging weights leads to wider optima.

    **Example**:

    >>> import posterity as po
    >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
    >>> joint = po.Joint(torch.nn.Linear(1, 1), po.likelihoods.Gaussian(scale=0.5), po.priors.Normal(), num_data=40)
    >>> start, _ = po.infer(po.methods.MAP(steps=500), joint, (x, 2 * x))
    >>> fit = po.methods.MAP(steps=400, batch_size=8, optimizer=po.optim.SGD(0.05))
    >>> q, trace = po.infer(po.methods.SWAG(fit, every=5, rank=10), joint, (x, 2 * x), start=start)
    >>> q.sample(3, po.Key(0)).shape
    torch.Size([3, 2])
    """

    fit: MAP = SETTLED_LATER
    every: int = SETTLED_LATER
    rank: int = 20
    warmup: int = SETTLED_LATER
    scale: float = 1.0

    def __post_init__(self) -> None:
        fit: object = self.fit
        if fit is not None and not isinstance(fit, MAP):
            raise TypeError(f"SWAG.fit must be of kind MAP. Got {shown(self.fit)}.")
        positive_whole("SWAG.every", 1 if self.every is None else self.every)
        whole("SWAG.rank", self.rank)
        whole("SWAG.warmup", 0 if self.warmup is None else self.warmup)
        if self.rank == 1:
            raise ValueError(
                "SWAG.rank must be 0, for a diagonal covariance, or at least 2, since deviations are divided by "
                "rank - 1. Got 1."
            )
        positive("SWAG.scale", self.scale)
        if fit is None or fit.steps is None:
            return
        every, warmup = _EVERY if self.every is None else self.every, self.warmup or 0
        count, wanted = (self.fit.steps - warmup) // every, max(2, self.rank)
        if count < wanted:
            raise ValueError(
                f"SWAG must collect at least {wanted} thetas (2, or its rank). Got {max(0, count)} "
                f"from {self.fit.steps} steps, one every {every} after the first {warmup}. "
                "Use more steps, a smaller every, or a smaller rank."
            )

    def settled(self, joint: Problem, data: Data) -> "SWAG":
        fit: MAP | None = self.fit
        warmup: int | None = self.warmup
        every: int | None = self.every
        if fit is None:
            rows = max(1, data.num_data)
            size = max(1, min(_MOST_ROWS, rows // 2, max(_LEAST_ROWS, rows // _BATCHES)))
            batches = batches_in_pass(data, size)
            usual = min(_MOST_STEPS, max(_LEAST_STEPS, _PASSES * batches))
            warmup = 2 * usual if warmup is None else warmup
            later = max(usual, max(2, self.rank) * (1 if every is None else every))
            rule = StationarySGD(
                warmup=max(1, warmup), batches=float(batches), rate=usual_rate(joint), curvature=_prior_curvature(joint)
            )
            fit = MAP(steps=warmup + later, batch_size=size, optimizer=rule, schedule=Constant())
            every = max(1, later // max(_COLLECTED, self.rank)) if every is None else every
        every = _EVERY if every is None else every
        return replace(self, fit=fit.stepped(joint, data), every=every, warmup=warmup or 0)

    def doubts(self, joint: Problem, trace: "Trace") -> Sequence[str]:
        return risen("SWAG", trace, expected=joint.size / joint.num_data)  # twice the half a nat of each weight

    def closing(self, joint: Problem, state: SWAGState, data: Data) -> Info:
        """Record "width_cost", the nats a row by which draws predict worse than the mean, or than the start."""
        rows = min(data.num_data, self.fit.batch_size or data.num_data)
        seen = self.fit.steps * max(rows, 32)  # batches of fewer rows hardly take less time
        posterior = partial(self.posterior, joint, [state])
        return measured_width_cost("SWAG", joint, posterior, data, seen, start=state.start)

    @property
    def traits(self) -> Traits:
        recordable = self.fit is not None and self.fit.traits.recordable
        return Traits(anytime=False, recordable=recordable, passes=("bf16", "micro_batch"))

    def recordable(self, state: SWAGState) -> Callable[[Problem, Any, Batch, Key], tuple[Any, Info]] | None:
        if not self.traits.recordable or state.fit.step >= self.fit.steps:  # the last pass is short
            return None
        since = state.fit.step + 1 - self.warmup
        return self._collecting if since > 0 and since % self.every == 0 else self._fitting

    @property
    def batch_size(self) -> int | None:
        """Rows of a batch of the fit."""
        return self.fit.batch_size

    def with_scales(self, joint: Joint, data: Data, start: Joint | None, key: Key) -> Joint:
        return self.fit.with_scales(joint, data, start, key)

    def prepared(self, joint: Problem, data: Data) -> Problem:
        return self.fit.prepared(joint, data)

    def footprint(self, joint: Problem, data: Data) -> Footprint:
        count, members, theta = joint.num_random, joint.num_members or 1, theta_bytes(joint)
        fit = fit_bytes(self.fit.optimizer, joint, data, self.fit.batch_size)
        activations = {"activations of a batch": fit.pop("activations of a batch")}
        moments, deviations = members * 8 * (joint.size + count), self.rank * theta_bytes(joint, count)
        held = {"weights": 2 * theta, **fit, "gradient": 2 * theta, "moments": moments, "deviations": deviations}
        collecting = {"new moments": moments + members * 2 * 8 * joint.size}
        covariance = members * 8 * count * (2 * self.rank + 3)
        end = {"copy of the moments": theta + moments + deviations, "covariance": covariance}
        words = f"SWAG of rank {self.rank} over {joint.num_weights:,} weights"
        return Footprint.at_peak(words, held, activations, collecting, end)

    def batches(self, data: Data, key: Key) -> Feed:
        """The batches of the fit, then of one pass for batch-norm statistics."""
        again = self._last_pass(data, self.fit.batch_size, key)
        return self.fit.batches(data, key).with_passes(again, (self.fit.steps,))

    def _last_pass(self, data: Data, batch_size: int | None, key: Key) -> Feed:
        size = data.num_data if batch_size is None else max(1, min(batch_size, data.num_data))
        count = data.num_data // size if data.num_data else 1
        if isinstance(data, StreamData) and isinstance(data.source, DataLoader):
            count = len(data.source)
        return data.minibatches(batch_size, count, key.fold("statistics"))

    def init(self, joint: Problem, theta: Tensor, key: Key) -> SWAGState:
        return self._empty(joint, self.fit.init(joint, theta, key))._replace(start=theta.clone())

    def _empty(self, joint: Problem, fit: MAPState) -> SWAGState:
        """Return the state before the first theta is collected."""
        lead, count = fit.theta.shape[:-1], joint.num_random
        return SWAGState(
            fit=fit,
            mean=torch.zeros_like(fit.theta, dtype=torch.float64),
            squares=fit.theta.new_zeros((*lead, count), dtype=torch.float64),
            deviations=fit.theta.new_zeros((*lead, self.rank, count)),
            collected=0,
            statistics={},
            batches=0,
        )

    def step(self, joint: Problem, state: SWAGState, batch: Batch, key: Key) -> tuple[SWAGState, Info]:
        """Step the fit and perhaps collect theta; or take a batch of the last pass."""
        if state.fit.step >= self.fit.steps:
            return _refreshed(joint, state, batch), {}
        since = state.fit.step + 1 - self.warmup
        step = self._collecting if since > 0 and since % self.every == 0 else self._fitting
        return step(joint, state, batch, key)

    def _fitting(self, joint: Problem, state: SWAGState, batch: Batch, key: Key) -> tuple[SWAGState, Info]:
        fit, info = self.fit.step(joint, state.fit, batch, key)
        return state._replace(fit=fit), info

    def _collecting(self, joint: Problem, state: SWAGState, batch: Batch, key: Key) -> tuple[SWAGState, Info]:
        state, info = self._fitting(joint, state, batch, key)
        return self.collect(joint, state), info

    def collect(self, joint: Problem, state: SWAGState) -> SWAGState:
        """Add theta to the moments; its deviation replaces the oldest."""
        theta = state.fit.theta.to(torch.float64)
        before = theta - state.mean
        # On the device, as in a recorded step, so that plain steps have the same bits.
        collected = torch.as_tensor(state.collected, dtype=torch.float64, device=theta.device)
        mean = state.mean + before / (collected + 1)
        after = theta - mean
        # Welford's sum: E[theta^2] - m^2 would cancel, and could be negative.
        random = slice(joint.num_weights) if joint.random_indices is None else joint.random_indices
        squares = state.squares + (before * after)[..., random]
        if self.rank:
            slot = (collected % self.rank).long().reshape(1)
            state.deviations.index_copy_(-2, slot, after[..., random].unsqueeze(-2).to(state.deviations.dtype))
        return state._replace(mean=mean, squares=squares, collected=state.collected + 1)

    def from_checkpoints(
        self,
        joint: Joint,
        checkpoints: Iterable[Mapping[str, Tensor]],
        data: object = None,
        *,
        batch_size: int | None = 128,
        seed: int = 0,
    ) -> Gaussian:
        """Return the posterior from checkpoints of a training loop elsewhere: state dicts, oldest first.

        They are collected one by one, as the thetas of a run are; of the settings `rank` and `scale` count, and of the
        joint what the posterior holds: network, noise and random weights. With `data` batch-norm
        statistics at the mean come from one pass over the rows, in batches of `batch_size` (a loader has its own);
        without, they are the last checkpoint's, and the log says so.

        >>> import posterity as po
        >>> joint = po.Joint(torch.nn.Linear(1, 1), po.likelihoods.Gaussian(scale=0.5), po.priors.Normal(), num_data=9)
        >>> states = [torch.nn.Linear(1, 1).state_dict() for _ in range(4)]
        >>> po.methods.SWAG(rank=2).from_checkpoints(joint, states).sample(3).shape
        torch.Size([3, 2])
        """
        problem_of("SWAG.from_checkpoints", joint.network, joint.likelihood, joint.prior, joint.num_data)
        network, state = joint.network, None
        last: Mapping[str, Tensor] = {}
        for last in checkpoints:
            theta = network.layout.flatten(named_weights("SWAG.from_checkpoints", last, network.layout))
            fit = MAPState(theta.to(network.initial), None, {}, 0)
            state = self.collect(joint, self._empty(joint, fit) if state is None else state._replace(fit=fit))
        if state is None or state.collected < max(2, self.rank):
            count = 0 if state is None else state.collected
            raise ValueError(
                f"SWAG.from_checkpoints needs at least {max(2, self.rank)} checkpoints (2, or the rank). Got {count}. "
                "Give more of them, or a smaller rank: SWAG(rank=...)."
            )
        running = {name: last[name].detach().to(b) for name, b in network.buffers.items() if name in network.running}
        state = state._replace(fit=state.fit._replace(buffers=running))
        if data is not None:
            rows = joint.checked(data_of(joint, data).to(joint.device))
            for batch in self._last_pass(rows, batch_size, Key(seed).fold("batches")).from_step(0):
                assert batch is not None
                state = _refreshed(joint, state, batch)
        elif network.trains_statistics:
            logger.warning(
                "SWAG.from_checkpoints: batch-norm statistics are those of the last checkpoint, which the mean of the "
                "weights may not fit. Give the training rows: from_checkpoints(joint, checkpoints, data)."
            )
        return self.posterior(joint, [state])

    def keep(self, state: SWAGState) -> SWAGState:
        return state._replace(fit=self.fit.keep(state.fit), start=None)

    def posterior(self, joint: Problem, kept: Sequence[SWAGState]) -> Gaussian:
        last = kept[-1]
        if last.collected < 2:
            raise ValueError(
                f"SWAG needs at least 2 collected thetas for a covariance. Got {last.collected} after "
                f"{last.fit.step} steps. Let it run on: the first is after step {self.warmup + self.every}."
            )
        theta = last.mean.to(last.fit.theta.dtype)
        buffers = {name: last.statistics.get(name, b).to(b.device) for name, b in last.fit.buffers.items()}
        variance = (self.scale**2 * last.squares / last.collected).clamp(min=_LEAST)
        precision: Precision = Diagonal(1.0 / variance)
        if self.rank:
            count = min(last.collected, self.rank)
            spread = self.scale / math.sqrt(2.0 * (count - 1))
            precision = LowRankCovariance(0.5 * variance, spread * last.deviations[..., :count, :].to(torch.float64))
        return Gaussian(joint.fitted(theta), theta[..., : joint.num_weights], precision, buffers)


def _prior_curvature(joint: Problem) -> float:
    """Return the largest inverse variance of the tempered prior; 0 where there is none."""
    if not isinstance(joint, Joint):
        return 0.0
    variance = joint.bound_prior.variance(joint.network.initial)
    precision = float((1.0 / variance).nan_to_num(0.0, 0.0, 0.0).max())
    return precision * float(torch.as_tensor(joint.powers[1]).max())


def _refreshed(joint: Problem, state: SWAGState, batch: Batch) -> SWAGState:
    """Add a batch to the average of the batch-norm statistics at the mean."""
    if joint.network is None or not state.fit.buffers:
        return state
    weights = joint.split(state.mean.to(state.fit.theta.dtype))[0]
    own = joint.network.batch_statistics(weights, batch.inputs, state.fit.buffers, per_member=batch.per_member)
    known = {name: state.statistics[name].to(value.device) if state.batches else value for name, value in own.items()}
    statistics = {name: known[name] + (value - known[name]) / (state.batches + 1) for name, value in own.items()}
    return state._replace(statistics=statistics, batches=state.batches + 1)
