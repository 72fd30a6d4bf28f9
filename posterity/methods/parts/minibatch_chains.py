"""Base of SGLD and SGHMC: chains on mini-batches, their usual lengths, and warnings about their temperatures."""

import math
from abc import abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from posterity.diagnostics.chains import rhat
from posterity.errors import check_batch_size, of_kinds, positive, shown
from posterity.inference.allocations import batch_bytes, gradient_bytes
from posterity.inference.kept import kept_bytes, stacked
from posterity.inference.method import Footprint, Method, Traits, Work, theta_bytes
from posterity.methods.parts.chains import APART, Chains, warn_of_unmixed
from posterity.methods.parts.fisher import Fisher
from posterity.methods.parts.gradient_runs import batches_in_pass, risen, usual_rate
from posterity.methods.parts.preconditioners import Plain, Preconditioner
from posterity.methods.parts.work import gradient_work
from posterity.model import Buffers, Problem
from posterity.model.data import Batch, Data, Feed, OwnOrders, TensorData
from posterity.model.joint import Joint
from posterity.numerics.random import Key
from posterity.optim.schedules import Cycles, Schedule
from posterity.posteriors.samples import Samples
from posterity.storage import leaves

if TYPE_CHECKING:
    from posterity.inference.run import Trace

COLD, HOT = 0.5, 2.0  # temperatures, averaged over the last half of a run, that are not doubted
_LEAST_WARMUP = 100  # in which steps can be learnt
_BLOCKS = 20  # means of consecutive losses, of which that R-hat is taken: single ones are noise of batches
_ERRORS = 3.0  # standard errors by which a temperature must be outside its bounds


class MinibatchDraw(NamedTuple):
    """A draw of every chain, theta (C, P), with its batch-norm statistics."""

    theta: Tensor
    buffers: Buffers


class MinibatchChains(Chains):
    """Chains that step together, theta (C, P), along gradients of the tempered log density on mini-batches.

    A subclass is a frozen dataclass with the fields below, and defines a step. The first `warmup` steps are not kept;
    then every `thin`-th is, until there are `draws` of each chain. Under `Cycles` whole cycles are warm-up, as many as
    `warmup` steps touch, `thin` counts the sampling steps of a cycle, and there is no noise while a cycle explores.
    Rows in memory come in another order for each chain, rows of a loader in one order for all.
    """

    step_size: float | None
    batch_size: int | None
    schedule: Schedule
    preconditioner: Preconditioner | None

    vectors: ClassVar[int]
    """Vectors of theta's size in the state of a chain, beside its preconditioner."""
    scratch: ClassVar[int]
    """Vectors of theta's size that a step takes beside the state."""

    def __post_init__(self) -> None:
        name = type(self).__name__
        self._check_counts()
        size: object = self.step_size
        if isinstance(size, Tensor):
            raise ValueError(f"{name}.step_size must be a positive number or None. Got {shown(size)}.")
        if size is not None:
            positive(f"{name}.step_size", size, "or None")
        check_batch_size(f"{name}.batch_size", self.batch_size)
        kinds = {} if self.preconditioner is None else {"preconditioner": Preconditioner}
        of_kinds(self, schedule=Schedule, **kinds)
        if self.rule.learns and self.warmup == 0:
            kind = type(self.rule).__name__
            raise ValueError(f"{name}.warmup must be a positive whole number: {kind} is learnt in it. Got 0.")
        if isinstance(self.schedule, Cycles) and self.thin is not None and not self._cycles[0]:
            sampling = self.schedule.length - self.schedule.first
            raise ValueError(
                f"{name}.thin must be at most the {sampling} steps of a cycle that sample. Got {self.thin}. "
                "Use longer cycles, or a smaller thin."
            )

    def _check_counts(self) -> None:
        left_out = {name: 1 for name in ("draws", "warmup", "thin") if getattr(self, name) is None}
        if left_out:
            replace(self, **left_out)  # type: ignore[type-var]  # checks the others; each kind is a dataclass
        else:
            super()._check_counts()

    @property
    def rule(self) -> Preconditioner:
        """The preconditioner; where none is set `Fisher`, or `Plain` for a step size, a short warm-up, or `Cycles`."""
        if self.preconditioner is not None:
            return self.preconditioner
        long = self.warmup is None or self.warmup >= _LEAST_WARMUP
        learns = self.step_size is None and long and not isinstance(self.schedule, Cycles)
        return Fisher() if learns else Plain()

    def settled(self, joint: Problem, data: Data) -> Self:
        """Choose the counts: with `Fisher` by the number r of batches in a pass, else 2,000, 100 and 20 (see `Cycles`).

        The warm-up has 100 r steps, at least 2,000 and at most 20,000; 100 draws of each chain are 10 r steps apart, at
        least 20 and at most 200.
        """
        rule, batches = self.rule, batches_in_pass(data, self.batch_size)
        counts = {"warmup": 2000, "draws": 100, "thin": 20}
        if isinstance(rule, Fisher):
            counts["warmup"] = min(20_000, max(2000, 100 * batches))
            counts["thin"] = min(200, max(20, 10 * batches))
            if self.preconditioner is None:
                rule = Fisher(rate=usual_rate(joint))
        if isinstance(self.schedule, Cycles):
            counts["thin"] = min(counts["thin"], self.schedule.length - self.schedule.first)
        left_out = {name: count for name, count in counts.items() if getattr(self, name) is None}
        return replace(self, **left_out, preconditioner=rule)  # type: ignore[type-var]

    def with_scales(self, joint: Joint, data: Data, start: Joint | None, key: Key) -> Joint:
        """Return the problem with the scales that were left out chosen by the evidence, as for a mode.

        Under a hyper-prior the log density is largest where all weights are 0, and the search for a mode would end
        there, far from the posterior's mass.
        """
        from posterity.methods.parts.scales import by_evidence  # made of methods, as these are

        return by_evidence(joint, data, start, key)

    @property
    def _cycles(self) -> tuple[int, int]:
        """Draws of each chain in a cycle, and the number of cycles that are warm-up."""
        assert isinstance(self.schedule, Cycles)
        return (self.schedule.length - self.schedule.first) // self.thin, -(-self.warmup // self.schedule.length)

    @property
    def steps(self) -> int:
        """Number of steps of a run."""
        if not isinstance(self.schedule, Cycles):
            return self.warmup + self.draws * self.thin
        each, first = self._cycles
        whole, rest = divmod(self.draws, each)
        return (first + whole) * self.schedule.length + (self.schedule.first + rest * self.thin if rest else 0)

    @property
    def kept_steps(self) -> Collection[int]:
        if None in (self.draws, self.warmup, self.thin):
            return (1,)  # there will be some, once it is settled
        if not isinstance(self.schedule, Cycles):
            return super().kept_steps
        each, first = self._cycles
        begins = [(first + d // each) * self.schedule.length + self.schedule.first for d in range(self.draws)]
        return frozenset(begin + (draw % each + 1) * self.thin for draw, begin in enumerate(begins))

    @property
    def traits(self) -> Traits:
        return replace(super().traits, recordable=True, passes=("bf16", "micro_batch"))

    def shortened(self, length: int) -> tuple[Method, str] | None:
        reason = (
            f"its schedule {self.schedule} is spread over all steps, unlike Constant() and Cyclic()"
            if self.schedule.spreads
            else ""
        )
        return replace(self, draws=length), reason  # type: ignore[type-var]

    @property
    def usual_rate(self) -> float:
        """Learning rate for `step_size=None`."""
        return self.rule.usual_rate()

    @staticmethod
    @abstractmethod
    def step_size_for(learning_rate: float, joint: Problem) -> float | Tensor:
        """The step size at which theta moves as SGD with this learning rate moves it; (M,) for members."""

    def step_size_at(self, joint: Problem, step: int | Tensor) -> float | Tensor:
        """Step size at a step, from 0: a number, a tensor (), or (C, 1) where each chain has another problem."""
        whole = self.step_size_for(self.usual_rate, joint) if self.step_size is None else self.step_size
        if isinstance(whole, Tensor):
            whole = whole.to(joint.device, joint.dtype).unsqueeze(-1)
        size = whole * self.schedule.factor(step, self.steps)
        return size.to(joint.dtype) if isinstance(size, Tensor) else size

    def preconditioned(
        self, joint: Problem, known: Any, theta: Tensor, grad: Tensor, step: Tensor
    ) -> tuple[Any, float | Tensor]:
        """Statistics of the preconditioner after this gradient at theta, and its diagonal."""
        known, factor = self.rule.learn(known, theta, grad, step, self.warmup), loss_factor(joint)
        if isinstance(factor, Tensor):
            factor = factor.unsqueeze(-1)
        return known, self.rule.matrix(known, step, self.warmup, factor)

    def noise_at(self, theta: Tensor, step: Tensor, key: Key) -> Tensor:
        """Standard normal numbers (C, P), drawn in float32 for every dtype; zeros while a cycle explores."""
        noise = key.normal(tuple(theta.shape), torch.float32, theta.device).to(theta.dtype)
        return noise * self.schedule.samples(step) if isinstance(self.schedule, Cycles) else noise

    def footprint(self, joint: Problem, data: Data) -> Footprint:
        words = f"{super().footprint(joint, data).words}, {self.chains} chains of {self.draws:,} draws"
        theta = (self.chains if joint.num_members is None else 1) * theta_bytes(joint)  # else the joint counts them
        chains = None if self.chains == 1 and joint.num_members is None else self.chains
        batch = batch_bytes(self._own_orders(data), self.batch_size)
        activations = batch + gradient_bytes(joint, data, self.batch_size, chains)
        kept = kept_bytes(joint, self.chains, self.draws - 1, statistics=0) if self.draws > 1 else {}
        state = self.rule.init(torch.empty(1, joint.size, dtype=joint.dtype, device="meta"))
        rule = sum(leaf.numel() for leaf in leaves(state).values() if isinstance(leaf, Tensor)) // joint.size
        held = {"weights": (self.vectors + rule + (self.draws > 1)) * theta, **kept}
        step = {"gradient and noise": (self.scratch + 2 * rule) * theta + batch}
        phases = {"gradient": theta, "activations of a batch": activations}, step
        return Footprint.at_peak(words, held, *phases)

    def work(self, joint: Problem, data: Data) -> Work | None:
        own = gradient_work(type(self).__name__, joint, data, self.batch_size, vectors=12)
        times = self.chains if joint.num_members is None else 1  # else the joint counts them
        return own and replace(own.times(times), units=self.steps)

    def batches(self, data: Data, key: Key) -> Feed:
        """Shuffled mini-batches, in another order for each chain where the rows are in memory."""
        return self._own_orders(data).minibatches(self.batch_size, self.steps, key)

    def _own_orders(self, data: Data) -> Data:
        if not isinstance(data, TensorData):
            return data
        return OwnOrders(data, lambda key: [key.fold(f"chain {index}") for index in range(self.chains)])

    def doubts(self, joint: Problem, trace: "Trace") -> Sequence[str]:
        """Warn of a loss that rose, of temperatures that are not 1, and of chains that have not mixed."""
        name, loss = type(self).__name__, trace["loss"]
        if isinstance(self.schedule, Cycles) or len(loss) <= self.warmup:
            return ()
        # At temperature 1 each weight costs half a nat.
        found = risen(name, trace, expected=joint.size / joint.num_data)
        found += [
            doubt
            for kind in ("kinetic", "configurational")
            if f"{kind}_temperature" in trace
            for doubt in _off(name, kind, trace[f"{kind}_temperature"])
        ]
        later = loss[self.warmup :]
        if later.dim() > 1 and later.shape[1] > 1 and joint.num_members is None and len(later) >= 2 * _BLOCKS:
            value = float(rhat(_blocks(later).T.unsqueeze(-1)))
            if value > APART:
                found.append(
                    f"{name}: chains have not mixed: R-hat of the loss is {value:.2f}, above {APART}. Draws of "
                    "different chains are from different places, as is usual for networks: take more warmup and a "
                    "larger thin, or an ensemble. See diagnostics.convergence(q, x)."
                )
        return found

    def keep(self, state: Any) -> MinibatchDraw:
        return MinibatchDraw(state.theta, state.buffers)

    def posterior(self, joint: Problem, kept: Sequence[MinibatchDraw]) -> Samples:
        draws = stacked(kept)
        buffers = {name: b.transpose(0, 1) for name, b in draws.buffers.items()}
        theta = draws.theta.transpose(0, 1)  # (C, D, P)
        if joint.num_members is None:
            warn_of_unmixed(type(self).__name__, theta)
        return Samples(joint, theta, {}, buffers)


def _blocks(values: Tensor) -> Tensor:
    """Return the means (blocks, C) of consecutive values (T, C)."""
    length = len(values) // _BLOCKS
    return values[len(values) - _BLOCKS * length :].reshape(_BLOCKS, length, -1).mean(1)


def _off(name: str, kind: str, values: Tensor) -> list[str]:
    """Return a warning where the mean temperature over the last half of the steps is not near 1."""
    half = values[len(values) // 2 :].reshape(-1, values.shape[-1] if values.dim() > 1 else 1)
    if len(half) < _BLOCKS:
        return []
    means = _blocks(half).mean(1)
    mean, error = float(means.mean()), float(means.std()) / math.sqrt(_BLOCKS)
    if mean - _ERRORS * error > HOT:
        why = "steps are too large for the curvature or for the rows of a batch. Use a smaller step_size or more rows"
    elif mean + _ERRORS * error < COLD:
        why = "chains have not come far enough from their start. Use more warmup, or a larger step_size"
    else:
        return []
    return [f"{name}: the {kind} temperature is {mean:.3g} over the last half of the run, where 1 is right: {why}."]


def step_number(step: int | Tensor, device: torch.device) -> Tensor:
    """Number of a step as a tensor () in float64, as it is in recorded steps.

    So plain steps do the same arithmetic on the device, and a run that resumes with them has the same bits: numbers
    of Python are rounded elsewhere, and CUDA multiplies by their inverse where it divides by a tensor.
    """
    return step if isinstance(step, Tensor) else torch.full((), step, dtype=torch.float64, device=device)


def loss_factor(joint: Problem) -> float | Tensor:
    """Ratio of the gradient of the log density to that of the mean loss per datum: a number, or (M,)."""
    factor: float | Tensor = joint.num_data * joint.powers[0]
    return factor


def chain_gradients(joint: Problem, theta: Tensor, batch: Batch, buffers: Buffers) -> tuple[Tensor, Tensor, Buffers]:
    """`joint.value_and_grad` of chains (C, P); a single chain runs as theta (P,), which is quicker."""
    if len(theta) > 1 or joint.num_members is not None:
        return joint.value_and_grad(theta, batch, buffers)
    alone = batch if batch is None else batch.member(0)
    value, grad, after = joint.value_and_grad(theta[0], alone, {name: b[0] for name, b in buffers.items()})
    return value.unsqueeze(0), grad.unsqueeze(0), {name: b.unsqueeze(0) for name, b in after.items()}


def chain_info(
    joint: Problem,
    theta: Tensor,
    value: Tensor,
    grad: Tensor,
    step_size: float | Tensor,
    reference: Tensor | None = None,
) -> dict[str, Any]:
    """Trace entries of a step from theta (C, P), a number for each chain.

    The configurational temperature is -(theta - reference) . grad / P. If theta follows the tempered density
    exp(value), its expectation is 1, also with the gradient of a batch that theta does not depend on; where theta
    spreads too far, by large steps or gradient noise, it is larger.
    """
    away = theta if reference is None else theta - reference
    sizes = step_size.reshape(-1) if isinstance(step_size, Tensor) else theta.new_full((1,), step_size)
    return {
        "loss": -value / joint.num_data,
        "configurational_temperature": -(away * grad).sum(-1) / theta.shape[-1],
        "step_size": sizes.expand(len(theta)).clone(),
    }
