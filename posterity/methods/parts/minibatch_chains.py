"""Base of SGLD and SGHMC: chains on mini-batches, preconditioners."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from posterity.errors import check_batch_size, fraction, of_kinds, positive, shown
from posterity.inference.kept import kept_bytes, stacked
from posterity.inference.memory import activation_bytes
from posterity.inference.method import Footprint, Traits, theta_bytes
from posterity.methods.parts.chains import Chains
from posterity.model import Buffers, Problem
from posterity.model.data import Batch, Data, Feed, OwnOrders, TensorData
from posterity.numerics.random import Key
from posterity.optim.schedules import Cycles, Schedule
from posterity.posteriors.samples import Samples


class Preconditioner(ABC):
    """A positive diagonal matrix G that multiplies the gradient and the variance of the noise.

    It is learnt in the warm-up alone and constant while draws are kept, so that these have an exact law.
    """

    learning_rate: ClassVar[float]
    """Learning rate of SGD on the mean loss, times G, that sets the default step size of samplers."""

    learns: ClassVar[bool]
    """Whether it needs a warm-up."""

    @abstractmethod
    def init(self, theta: Tensor) -> Tensor | None:
        """Return the running statistics before the first gradient of chains theta (C, P)."""

    @abstractmethod
    def learn(self, known: Tensor | None, grad: Tensor, step: Tensor, warmup: int) -> Tensor | None:
        """Return the running statistics after the gradient of a step, whose number from 0 stays a tensor ()."""

    @abstractmethod
    def matrix(self, known: Tensor | None, step: Tensor, warmup: int, num_data: float | Tensor) -> float | Tensor:
        """Return the diagonal of G, 1 or (C, P), after `learn` of that step.

        `num_data`, a number or (C, 1), is the ratio of the gradient to that of the mean loss.
        """


@dataclass(frozen=True)
class Plain(Preconditioner):
    """No preconditioner: G = 1.

    >>> Plain().matrix(None, torch.tensor(0.0), 10, 100.0)
    1.0
    """

    learning_rate: ClassVar[float] = 0.03
    learns: ClassVar[bool] = False

    def init(self, theta: Tensor) -> None:
        return None

    def learn(self, known: Tensor | None, grad: Tensor, step: Tensor, warmup: int) -> None:
        return None

    def matrix(self, known: Tensor | None, step: Tensor, warmup: int, num_data: float | Tensor) -> float | Tensor:
        return 1.0


@dataclass(frozen=True)
class RMSprop(Preconditioner):
    """Inverse root mean square of the running gradients of each weight in each chain, as in RMSprop.

    V <- decay V + (1 - decay) grad^2, divided by 1 - decay^t after t steps, and G = num_data / (sqrt(V) + damping): a
    step along G grad / num_data is one of RMSprop on the mean loss. V is constant after the warm-up. (Li et al., 2016,
    Algorithm 1, update it for ever and leave out the derivative of G: a bias that no step size removes.) `damping`, in
    units of the gradient of the whole log density, bounds the steps of weights that have no gradient yet: under a
    prior N(0, 1) it is about 1 later.

    >>> rule, grad, step = RMSprop(damping=0.5), torch.tensor([[2.0, 0.0]]), torch.tensor(0.0)
    >>> known = rule.learn(rule.init(grad), grad, step, 10)
    >>> rule.matrix(known, step, 10, 1.0)
    tensor([[0.4000, 2.0000]])
    """

    learning_rate: ClassVar[float] = 1e-3
    learns: ClassVar[bool] = True

    decay: float = 0.99
    damping: float = 1.0

    def __post_init__(self) -> None:
        fraction("RMSprop.decay", self.decay)
        positive("RMSprop.damping", self.damping)

    def init(self, theta: Tensor) -> Tensor:
        return torch.zeros_like(theta)

    def learn(self, known: Tensor | None, grad: Tensor, step: Tensor, warmup: int) -> Tensor:
        assert known is not None
        held = self.decay + (1.0 - self.decay) * (step >= warmup).to(step.dtype)
        return held * known + (1.0 - held) * grad.square()

    def matrix(self, known: Tensor | None, step: Tensor, warmup: int, num_data: float | Tensor) -> float | Tensor:
        assert known is not None
        count = (step + 1).clamp_max(warmup)
        return num_data / ((known / (1.0 - self.decay**count)).sqrt() + self.damping)


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
    preconditioner: Preconditioner

    def __post_init__(self) -> None:
        name = type(self).__name__
        self._check_counts()
        size: object = self.step_size
        if isinstance(size, Tensor):
            raise ValueError(f"{name}.step_size must be a positive number or None. Got {shown(size)}.")
        if size is not None:
            positive(f"{name}.step_size", size, "or None")
        check_batch_size(f"{name}.batch_size", self.batch_size)
        of_kinds(self, schedule=Schedule, preconditioner=Preconditioner)
        if self.preconditioner.learns and not self.warmup:
            kind = type(self.preconditioner).__name__
            raise ValueError(f"{name}.warmup must be a positive whole number: {kind} is learnt in it. Got 0.")
        if isinstance(self.schedule, Cycles) and not self._cycles[0]:
            sampling = self.schedule.length - self.schedule.first
            raise ValueError(
                f"{name}.thin must be at most the {sampling} steps of a cycle that sample. Got {self.thin}. "
                "Use longer cycles, or a smaller thin."
            )

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
        if not isinstance(self.schedule, Cycles):
            return super().kept_steps
        each, first = self._cycles
        begins = [(first + d // each) * self.schedule.length + self.schedule.first for d in range(self.draws)]
        return frozenset(begin + (draw % each + 1) * self.thin for draw, begin in enumerate(begins))

    @property
    def traits(self) -> Traits:
        return replace(super().traits, recordable=True)

    @property
    def usual_rate(self) -> float:
        """Learning rate for `step_size=None`."""
        return self.preconditioner.learning_rate

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
        self, joint: Problem, known: Tensor | None, grad: Tensor, step: Tensor
    ) -> tuple[Tensor | None, float | Tensor]:
        """Statistics of the preconditioner after this gradient, and its diagonal."""
        known, factor = self.preconditioner.learn(known, grad, step, self.warmup), loss_factor(joint)
        if isinstance(factor, Tensor):
            factor = factor.unsqueeze(-1)
        return known, self.preconditioner.matrix(known, step, self.warmup, factor)

    def noise_at(self, theta: Tensor, step: Tensor, key: Key) -> Tensor:
        """Standard normal numbers (C, P), drawn in float32 for every dtype; zeros while a cycle explores."""
        noise = key.normal(tuple(theta.shape), torch.float32, theta.device).to(theta.dtype)
        return noise * self.schedule.samples(step) if isinstance(self.schedule, Cycles) else noise

    def footprint(self, joint: Problem, data: Data) -> Footprint:
        words = f"{super().footprint(joint, data).words}, {self.chains} chains of {self.draws:,} draws"
        times = self.chains if joint.num_members is None else 1  # else the joint counts them
        parts = {
            "weights": 3 * times * theta_bytes(joint),
            "gradient and noise": 3 * times * theta_bytes(joint),
            "activations of a batch": 2 * times * activation_bytes(joint, data, self.batch_size),
            **kept_bytes(joint, self.chains, self.draws, statistics=0),
        }
        return Footprint(words, parts)

    def batches(self, data: Data, key: Key) -> Feed:
        """Shuffled mini-batches, in another order for each chain where the rows are in memory."""
        if isinstance(data, TensorData):
            data = OwnOrders(data, lambda key: [key.fold(f"chain {index}") for index in range(self.chains)])
        return data.minibatches(self.batch_size, self.steps, key)

    def keep(self, state: Any) -> MinibatchDraw:
        return MinibatchDraw(state.theta, state.buffers)

    def posterior(self, joint: Problem, kept: Sequence[MinibatchDraw]) -> Samples:
        draws = stacked(kept)
        buffers = {name: b.transpose(0, 1) for name, b in draws.buffers.items()}
        return Samples(joint, draws.theta.transpose(0, 1), {}, buffers)


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


def chain_info(joint: Problem, theta: Tensor, value: Tensor, grad: Tensor, step_size: float | Tensor) -> dict[str, Any]:
    """Trace entries of a step from theta (C, P), a number for each chain.

    The configurational temperature is -theta . grad / P. If theta follows the tempered density exp(value), its
    expectation is 1, also with the gradient of a batch that theta does not depend on; where theta spreads too far, by
    large steps or gradient noise, it is larger.
    """
    sizes = step_size.reshape(-1) if isinstance(step_size, Tensor) else theta.new_full((1,), step_size)
    return {
        "loss": -value / joint.num_data,
        "configurational_temperature": -(theta * grad).sum(-1) / theta.shape[-1],
        "step_size": sizes.expand(len(theta)).clone(),
    }
