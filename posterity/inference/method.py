"""The protocol of methods: five functions, traits, a footprint and work; the base of methods that follow gradients."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import Tensor

from posterity.errors import check_batch_size, of_kinds, positive_whole, shown
from posterity.model import Batch, Data, Density, Feed, Joint, Problem
from posterity.model.passes import Passes, Precision, rows_apart
from posterity.model.scales import with_scales_of
from posterity.numerics.random import Key
from posterity.optim import Optimizer, Schedule
from posterity.posteriors.posterior import Posterior
from posterity.processes import active

if TYPE_CHECKING:
    from posterity.inference.run import Trace

Info: TypeAlias = Mapping[str, Tensor | float]
"""Values that a step reports to the trace, by name."""
# How parts of a step are accelerated: recorded, on CUDA as graphs, or compiled as well.
Effort: TypeAlias = Literal["none", "recorded", "compiled"]

PREDICTED_ROWS = 1024  # rows for which a footprint counts the memory of predictions


@dataclass(frozen=True)
class Traits:
    """Properties of a method that the loop relies on.

    - `takes_members`: theta may be (M, P); members step together, each as it would alone.
    - `recordable`: a step on a GPU does the same work each time, depends only on the state (whose whole numbers may be
      tensors), the batch and the key, and never reads the value of a tensor: a CUDA graph may replay it.
    - `anytime`: a state before the last step gives a meaningful posterior (a sum over half the rows does not).
    - `row`: the meaning of a row of theta (M, P), for messages.
    - `kept_steps`: steps after which the state is kept for the posterior; if empty, the last state is.
    - `effort`: how the work that the next step hands to `Potential.run` is accelerated; None: not at all.
    - `passes`: which of "bf16" and "micro_batch" of `infer` a step allows: whether its gradients of batches may be
      rounded in the network, and summed over pieces of the batch.
    - `second_order`: steps take more than gradients of the network, which graphs of torch.compile do not give.
    - `accountable`: the part of a state that must be finite for the run to be stored; None: all of it.
    """

    takes_members: bool = True
    recordable: bool = False
    anytime: bool = True
    row: str = "member"
    kept_steps: Collection[int] = ()
    effort: Callable[[Problem, Any], Effort] | None = None
    passes: Collection[str] = ()
    second_order: bool = False
    accountable: Callable[[Any], Any] | None = None


@dataclass(frozen=True)
class Footprint:
    """The memory of a run beside its data.

    `words` name the method and what decides its size. `parts` are bytes by purpose, `predictions` the bytes of later
    predictions at 1,024 rows (0: unknown). `alternatives()` are other settings for the same problem, best first.
    """

    words: str
    parts: Mapping[str, int]
    predictions: int = 0
    alternatives: Callable[[], Mapping[str, "Method"]] = dict

    @property
    def total(self) -> int:
        """Bytes of all parts together."""
        return sum(self.parts.values())

    @classmethod
    def at_peak(cls, words: str, always: Mapping[str, int], *phases: Mapping[str, int]) -> "Footprint":
        """Return the footprint of a run of several phases: what it `always` holds, and the phase that takes most."""
        most: Mapping[str, int] = max(phases, key=lambda parts: sum(parts.values()))
        return cls(words, {**always, **most})

    def plus(self, parts: Mapping[str, int]) -> "Footprint":
        """Return the footprint with further parts."""
        return replace(self, parts={**self.parts, **parts})

    def larger(self, other: "Footprint") -> "Footprint":
        """Return the footprint of two methods that take turns: the larger of both in each part."""
        names = {**self.parts, **other.parts}
        return replace(self, parts={name: max(self.parts.get(name, 0), other.parts.get(name, 0)) for name in names})


@dataclass(frozen=True)
class Work:
    """The work of a run on one device, counted from shapes; `posterity.inference.costs` makes times of it.

    `kind` names the rates that apply, `unit` what is counted: "step", or "leapfrog" and the like. A unit takes so many
    `multiply_adds` and moves so many `moved` bytes between memory and processor. `units` is the number in a run, None
    where the run decides it. `once` are the multiply-adds after the last unit. `summed` numbers, of `itemsize` bytes,
    are added up over the devices that share the rows: after each unit, or only at the end if `summed_once`.
    """

    kind: str
    multiply_adds: int
    moved: int
    summed: int
    itemsize: int
    units: int | None = None
    unit: str = "step"
    once: int = 0
    summed_once: bool = False

    def times(self, members: int) -> "Work":
        """Return the work of so many members that step together."""
        counts = {name: members * getattr(self, name) for name in ("multiply_adds", "moved", "summed", "once")}
        return replace(self, **counts)


def theta_bytes(joint: Problem, size: int | None = None) -> int:
    """Return the bytes of a vector of this size (None: theta's), times the number of members of the problem."""
    return (joint.num_members or 1) * (joint.size if size is None else size) * joint.dtype.itemsize


class Method(ABC):
    """An inference method: a frozen dataclass of hyper-parameters, without tensors. `infer` owns the loop over steps.

    The state is a nested NamedTuple of tensors and numbers that holds only what the next step needs. `step` may
    overwrite the tensors of the state it is given, and nothing else. Info goes to the trace, which reads its tensors
    later: they must not be overwritten. Its entry "loss", in nats per datum, must be finite, or the run stops.

    A method defines `batches`, `init`, `step`, `keep` and `posterior`; everything else has a default.
    """

    @property
    def traits(self) -> Traits:
        """Properties of the method that the loop relies on."""
        return Traits()

    def settled(self, joint: Problem, data: Data) -> "Method":
        """Return the method with every setting that was left out (None) chosen for this problem; by default itself.

        It computes nothing: `infer` and `plan` call it first, and every other function is called on what it returns.
        """
        return self

    def with_scales(self, joint: Joint, data: Data, start: Joint | None, key: Key) -> Joint:
        """Return the problem with the scales chosen that were left out, or made part of the fit.

        `start` is the problem of the posterior that the run starts from. By default its fit's choice is taken over,
        and what it did not choose stays at its present value.
        """
        return joint if start is None else with_scales_of(joint, start)

    def prepared(self, joint: Problem, data: Data) -> Problem:
        """Return the problem that the run works on, once the data are known; by default the one given."""
        return joint

    def words(self, joint: Problem) -> str:
        """Return the name of the method, and over how many weights it runs."""
        return f"{type(self).__name__} over {joint.num_weights:,} weights"

    def footprint(self, joint: Problem, data: Data) -> Footprint:
        """Return the memory of a run; by default theta and its gradient."""
        return Footprint(self.words(joint), {"weights": 3 * theta_bytes(joint), "gradient": 2 * theta_bytes(joint)})

    def work(self, joint: Problem, data: Data) -> Work | None:
        """Return the work of a run, if it is modelled; by default None. `plan` says the time it takes."""
        return None

    @abstractmethod
    def batches(self, data: Data, key: Key) -> Feed:
        """Return the feed of batches, one per step."""

    def initial(self, joint: Problem, key: Key) -> Tensor:
        """Return theta (P,) or (M, P) to start from if `infer` gets no start; by default the module's own weights."""
        return joint.initial()

    @abstractmethod
    def init(self, joint: Problem, theta: Tensor, key: Key) -> Any:
        """Return the state before the first step, from theta (P,) or (M, P), which is left untouched."""

    @abstractmethod
    def step(self, joint: Problem, state: Any, batch: Batch, key: Key) -> tuple[Any, Info]:
        """Return the next state and the values to record."""

    def recordable(self, state: Any) -> Callable[[Problem, Any, Batch, Key], tuple[Any, Info]] | None:
        """Return the work of the step at this state that a graph may replay; by default all, or None by the traits.

        A method whose steps are of several kinds has a function for each, and None for those that run plainly.
        """
        return self.step if self.traits.recordable else None

    def shortened(self, length: int) -> "tuple[Method, str] | None":
        """Return this method with `length` steps (or draws), and why its run is not the beginning of this one's.

        The reason is "" where it is, bit for bit: then a stored run of the shorter one may go on as a run of this one.
        None, the default, where no run goes on for longer.
        """
        return None

    def finished(self, state: Any) -> str:
        """Return why the run may stop at this state; "" where it needs more steps."""
        return ""

    def closing(self, joint: Problem, state: Any, data: Data) -> Info:
        """Return values to record once, after the last step of a run; by default none."""
        return {}

    def doubts(self, joint: Problem, trace: "Trace") -> Sequence[str]:
        """Return warnings that the trace of a finished run gives rise to, each with its remedy; by default none."""
        return ()

    @abstractmethod
    def keep(self, state: Any) -> Any:
        """Return the part of a state that the posterior needs; called after `traits.kept_steps`."""

    def refined(self, posterior: Posterior, rows: Batch) -> Posterior:
        """Return the posterior after a look at validation rows; by default itself."""
        return posterior

    @abstractmethod
    def posterior(self, joint: Problem, kept: Sequence[Any]) -> Posterior:
        """Return the posterior from the kept states, oldest first."""


def check_arguments(caller: str, method: object, joint: object) -> None:
    """Raise a TypeError that names the caller unless these are a method and a problem."""
    if not isinstance(method, Method):
        hint = f" Call it: {method.__name__}()." if isinstance(method, type) else ""
        raise TypeError(f"{caller}: the first argument must be a Method. Got {shown(method)}.{hint}")
    if not isinstance(joint, (Joint, Density)):
        raise TypeError(f"{caller}: the problem must be a Joint or a Density. Got {shown(joint)}.")


def with_passes(
    method: Method, joint: Problem, data: Data, precision: Precision | None, micro_batch: int | None
) -> Problem:
    """Return the problem as the steps of a run see it, with other passes through the network where these are wanted.

    Active processes share these passes. Raises a ValueError where the method, the network or the dtype do not allow
    all this.
    """
    processes = active()
    name, network, allowed = type(method).__name__, joint.network, method.traits.passes
    if network is None:
        if precision or micro_batch:
            raise ValueError(
                "infer: precision and micro_batch are for networks, and a Density has none. Leave them out."
            )
        return joint
    if precision and joint.dtype != torch.float32:
        raise ValueError(f"infer: precision='bf16' needs weights of float32. Got {joint.dtype}. Use module.float().")
    for option, word in ((precision, "bf16"), (micro_batch, "micro_batch")):
        if option and word not in allowed:
            why = "use curvature, closed forms, a search for the mode, or noise for each row"
            if allowed:
                why = (
                    "compare log densities, of which bf16 keeps three digits"
                    if precision
                    else "draw masks for all rows, or cut their batches themselves"
                )
            raise ValueError(
                f"infer: {name} with these settings does not allow {word}: its steps {why}. Leave it out, or follow "
                "gradients alone, as MAP(optimizer=Adam()) does."
            )
    apart = micro_batch or processes is not None
    if apart and (network.trains_statistics or not rows_apart(network, data.first().member(0).inputs)):
        user = "micro_batch" if micro_batch else "a batch that several processes share"
        less = "Use a smaller batch_size" if micro_batch else "Use group or layer norm, run one process"
        raise ValueError(
            f"infer: {user} needs outputs of rows that do not depend on each other. Batch norm, or another layer, "
            f"uses statistics of the batch. {less}, or freeze batch norm by requires_grad=False."
        )
    compiled = bool(allowed and network.compiled) and not method.traits.second_order
    passes = Passes(precision, micro_batch, compiled, processes)
    return joint if passes == Passes() else replace(joint.as_joint("infer"), network=network.replace(passes=passes))


BatchSize: TypeAlias = int | Literal["auto"] | None
"""Rows in a step: a number, None for all of them, "auto" for what suits the data."""


class GradientFit(Method):
    """`steps` steps of `optimizer` on batches of `batch_size` rows; states have the fields `optimizer` and `step`.

    Settings that are None, and a batch size of "auto", were left out: `settled` chooses them.
    """

    steps: int | None
    batch_size: BatchSize
    schedule: Schedule | None
    optimizer: Optimizer | None

    def __post_init__(self) -> None:
        if self.steps is not None:
            positive_whole(f"{type(self).__name__}.steps", self.steps)
        if self.batch_size != "auto":
            check_batch_size(f"{type(self).__name__}.batch_size", self.batch_size)
        kinds = {"optimizer": Optimizer, "schedule": Schedule}
        of_kinds(self, **{name: kind for name, kind in kinds.items() if getattr(self, name) is not None})

    def chosen(self, name: str) -> Any:
        """Return a setting; raises a ValueError where it was left out and `settled` has not chosen it."""
        value = getattr(self, name)
        if value is None or value == "auto":
            kind = type(self).__name__
            raise ValueError(f"{kind}.{name} was left out. Give it, or use method.settled(joint, data), as infer does.")
        return value

    def shortened(self, length: int) -> "tuple[Method, str] | None":
        values = [getattr(self, field.name) for field in fields(self)]  # type: ignore[arg-type]  # a dataclass
        spread = [value for value in values if isinstance(value, Schedule) and value.spreads]
        reason = f"its schedule {spread[0]} is spread over all steps, unlike Constant() and Cyclic()" if spread else ""
        return replace(self, steps=length), reason  # type: ignore[type-var]

    def batches(self, data: Data, key: Key) -> Feed:
        size = self.batch_size if self.batch_size is None else self.chosen("batch_size")
        return data.minibatches(size, self.chosen("steps"), key)

    def _number(self, state: Any) -> int | Tensor:
        """Return the number of the step: on a GPU in float64 there, as in a recorded step, for the same bits."""
        step, parameters = state.step, state[0]
        return torch.as_tensor(step, dtype=torch.float64, device=parameters.device) if parameters.is_cuda else step

    def _step_size(self, state: Any) -> float | Tensor:
        schedule: Schedule = self.chosen("schedule")
        size: float = self.chosen("optimizer").step_size
        return size * schedule.factor(self._number(state), self.chosen("steps"))

    def _ascended(self, joint: Problem, parameters: Tensor, grad: Tensor, state: Any) -> Any:
        """Move the parameters in place along the gradient; returns the optimiser's moments."""
        optimizer: Optimizer = self.chosen("optimizer")
        return optimizer.ascend(parameters, grad, state.optimizer, self._step_size(state), joint.num_data)

    def keep(self, state: Any) -> Any:
        return state._replace(optimizer=None)
