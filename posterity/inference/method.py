"""What every inference method is: hyper-parameters, and four pure functions."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeAlias

from torch import Tensor

from posterity.inference.memory import theta_bytes
from posterity.model.data import Batch, Data, Feed
from posterity.model.density import Density
from posterity.model.joint import Joint
from posterity.numerics.random import Key
from posterity.posteriors.posterior import Posterior

Target: TypeAlias = Joint | Density
"""The problem that a method is run on."""
Info: TypeAlias = Mapping[str, Tensor | float]
"""What a step reports to the trace, by name."""
# How pieces of a step are made quicker: as CUDA graphs of their kernels, or as machine code as well.
Effort: TypeAlias = Literal["none", "recorded", "compiled"]


class Method(ABC):
    """A frozen dataclass of hyper-parameters, no tensors; `infer` owns the loop over steps.

    State is a NamedTuple of tensors, numbers and further such tuples that holds only what the next step needs.
    `step` may overwrite the tensors of the state it is given; it touches nothing else. Info goes to the trace, which
    reads its tensors later: they must not be overwritten. Its entry "loss", in nats per datum, must be finite, or
    the run stops.
    """

    # Whether the state before the last step makes a posterior worth looking at (a sum over half the rows does not).
    anytime: ClassVar[bool] = True
    # Whether a step on a GPU does the same work each time, with numbers that only come from the state (whose whole
    # numbers may be tensors), the batch and the key, and never looks at a tensor: it may be recorded and played again.
    recordable: ClassVar[bool] = False
    # What a row of theta (M, P) is, for a message that names one.
    row: ClassVar[str] = "member"

    @property
    def takes_members(self) -> bool:
        """Whether theta may be (M, P), all members stepping together and each as it would alone."""
        return True

    def effort(self, joint: Target, state: Any) -> Effort:
        """What is done with the work that the next step hands to `Potential.run`: by default nothing."""
        return "none"

    def prepared(self, joint: Target, data: Data) -> Target:
        """The problem that the run works on, once the data are known; by default the one given."""
        return joint

    def bytes(self, joint: Target, data: Data) -> dict[str, int]:
        """Bytes that a run takes beside its data, by what they are for: theta and its gradient if nothing is said."""
        return {"weights": 3 * theta_bytes(joint), "gradient": 2 * theta_bytes(joint)}

    def prediction_bytes(self, joint: Target, data: Data, rows: int) -> int:
        """Bytes that predictions at so many rows take later, on top of the posterior; 0 where that is not known."""
        return 0

    def alternatives(self, joint: Target, data: Data) -> dict[str, int]:
        """Other settings for the same problem, best first, with the bytes that they take in all beside the data."""
        return {}

    def describe(self, joint: Target, data: Data) -> str:
        """Method and number of weights in a few words, with the settings that decide how much memory it takes."""
        return f"{type(self).__name__} over {joint.num_weights:,} weights"

    @abstractmethod
    def batches(self, data: Data, key: Key) -> Feed:
        """What the method eats, one batch a step."""

    def initial(self, joint: Target, key: Key) -> Tensor:
        """theta (P,) or (M, P) to begin from where `infer` is given no start: by default the module's own weights."""
        return joint.initial()

    @abstractmethod
    def init(self, joint: Target, theta: Tensor, key: Key) -> Any:
        """The state before the first step, from theta (P,) or (M, P), which is left untouched."""

    @abstractmethod
    def step(self, joint: Target, state: Any, batch: Batch, key: Key) -> tuple[Any, Info]:
        """The next state and what to record."""

    def finished(self, state: Any) -> str:
        """Why the run needs no more steps after this state; "" where it does."""
        return ""

    def keeps(self, step: int) -> bool:
        """Whether the state after `step` steps is kept for the posterior (the last one is if none is)."""
        return False

    def keep(self, state: Any) -> Any:
        """The part of a kept state that the posterior needs."""
        return state

    def accountable(self, state: Any) -> Any:
        """The part of a state that must be finite for the run to go on and be stored: by default all of it."""
        return state

    @abstractmethod
    def posterior(self, joint: Target, kept: Sequence[Any]) -> Posterior:
        """The posterior from the kept states, oldest first."""
