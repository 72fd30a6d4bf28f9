"""What every inference method is: hyper-parameters and five pure functions, with its traits and its footprint."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from torch import Tensor

from posterity.errors import shown
from posterity.model import Batch, Data, Density, Feed, Joint, Problem
from posterity.numerics.random import Key
from posterity.posteriors.posterior import Posterior

Info: TypeAlias = Mapping[str, Tensor | float]
"""What a step reports to the trace, by name."""
# How pieces of a step are made quicker: as CUDA graphs of their kernels, or as machine code as well.
Effort: TypeAlias = Literal["none", "recorded", "compiled"]

PREDICTED_ROWS = 1024  # rows at which a footprint counts the memory of predictions


@dataclass(frozen=True)
class Traits:
    """What the loop may do with a method.

    - `takes_members`: theta may be (M, P); members step together, each as it would alone.
    - `recordable`: a step on a GPU does the same work each time, with numbers that only come from the state (whose
      whole numbers may be tensors), the batch and the key, and never looks at a tensor: it may be recorded and played.
    - `anytime`: a state before the last step makes a posterior worth looking at; a sum over half the rows does not.
    - `row`: what a row of theta (M, P) is, for a message that names one.
    - `kept_steps`: numbers of steps after which the state is kept for the posterior; where none is, the last one is.
    - `effort`: what is done with the work that the next step hands to `Potential.run`; None leaves it as it is.
    - `accountable`: the part of a state that must be finite for the run to be stored; None stands for all of it.
    """

    takes_members: bool = True
    recordable: bool = False
    anytime: bool = True
    row: str = "member"
    kept_steps: Collection[int] = ()
    effort: Callable[[Problem, Any], Effort] | None = None
    accountable: Callable[[Any], Any] | None = None


@dataclass(frozen=True)
class Footprint:
    """The memory that a run takes beside its data.

    `words` name the method with what decides its size. `parts` are bytes by purpose, `predictions` those of later
    predictions at 1,024 rows (0: not known). `alternatives()` are other settings for the same problem, best first.
    """

    words: str
    parts: Mapping[str, int]
    predictions: int = 0
    alternatives: Callable[[], Mapping[str, "Method"]] = dict

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(self.parts.values())

    def plus(self, parts: Mapping[str, int]) -> "Footprint":
        """The footprint with further parts."""
        return replace(self, parts={**self.parts, **parts})

    def larger(self, other: "Footprint") -> "Footprint":
        """The footprint with the larger of both in each part: of methods that take turns."""
        names = {**self.parts, **other.parts}
        return replace(self, parts={name: max(self.parts.get(name, 0), other.parts.get(name, 0)) for name in names})


def theta_bytes(joint: Problem, size: int | None = None) -> int:
    """Bytes of a vector as long as theta, or of this size; of one for each member where the problem has members."""
    return (joint.num_members or 1) * (joint.size if size is None else size) * joint.dtype.itemsize


class Method(ABC):
    """A frozen dataclass of hyper-parameters, no tensors; `infer` owns the loop over steps.

    State is a NamedTuple of tensors, numbers and further such tuples that holds only what the next step needs.
    `step` may overwrite the tensors of the state it is given; it touches nothing else. Info goes to the trace, which
    reads its tensors later: they must not be overwritten. Its entry "loss", in nats per datum, must be finite, or
    the run stops.

    A method states `batches`, `init`, `step`, `keep` and `posterior`; all else has a default.
    """

    @property
    def traits(self) -> Traits:
        """What the loop may do with the method."""
        return Traits()

    def prepared(self, joint: Problem, data: Data) -> Problem:
        """The problem that the run works on, once the data are known; by default the one given."""
        return joint

    def footprint(self, joint: Problem, data: Data) -> Footprint:
        """The memory that a run takes: theta and its gradient if nothing is said."""
        words = f"{type(self).__name__} over {joint.num_weights:,} weights"
        return Footprint(words, {"weights": 3 * theta_bytes(joint), "gradient": 2 * theta_bytes(joint)})

    @abstractmethod
    def batches(self, data: Data, key: Key) -> Feed:
        """What the method eats, one batch a step."""

    def initial(self, joint: Problem, key: Key) -> Tensor:
        """theta (P,) or (M, P) to begin from where `infer` is given no start: by default the module's own weights."""
        return joint.initial()

    @abstractmethod
    def init(self, joint: Problem, theta: Tensor, key: Key) -> Any:
        """The state before the first step, from theta (P,) or (M, P), which is left untouched."""

    @abstractmethod
    def step(self, joint: Problem, state: Any, batch: Batch, key: Key) -> tuple[Any, Info]:
        """The next state and what to record."""

    def finished(self, state: Any) -> str:
        """Why the run needs no more steps after this state; "" where it does."""
        return ""

    @abstractmethod
    def keep(self, state: Any) -> Any:
        """The part of a state that the posterior needs; `traits.kept_steps` says of which."""

    @abstractmethod
    def posterior(self, joint: Problem, kept: Sequence[Any]) -> Posterior:
        """The posterior from the kept states, oldest first."""


def check_arguments(caller: str, method: object, joint: object) -> None:
    """A TypeError that names the caller unless these are a method and a problem."""
    if not isinstance(method, Method):
        hint = f" Call it: {method.__name__}()." if isinstance(method, type) else ""
        raise TypeError(f"{caller}: the first argument must be a Method. Got {shown(method)}.{hint}")
    if not isinstance(joint, (Joint, Density)):
        raise TypeError(f"{caller}: the problem must be a Joint or a Density. Got {shown(joint)}.")
