"""How much memory a run takes, before anything is allocated."""

from dataclasses import dataclass, field

from posterity.errors import BadData, shown
from posterity.inference import memory
from posterity.inference.memory import data_bytes, human
from posterity.inference.method import Method, Target
from posterity.model.data import Data, NoData, as_data
from posterity.model.density import Density
from posterity.model.joint import Joint

ROWS = 1024  # of a predictive chunk
LATER = f"later, predictions at {ROWS:,} rows"


@dataclass(frozen=True)
class Plan:
    """Bytes that a run takes, by what they are for, and what the device has.

    `method` says which method and settings it is about. `alternatives` are other settings for the same problem with
    the bytes that they take in all, best first. `predictions` are the bytes of those at 1,024 rows, which come later
    and are no part of the run. `memory` is None where the device does not tell.
    """

    method: str
    device: str
    parts: dict[str, int]
    memory: int | None = None
    alternatives: dict[str, int] = field(default_factory=dict)
    predictions: int = 0

    @property
    def total(self) -> int:
        """All parts together."""
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        """Whether the device has as much; True where it does not tell."""
        return self.has_room(self.total)

    @property
    def fitting(self) -> tuple[str, ...]:
        """The alternatives that fit, best first."""
        return tuple(name for name, needed in self.alternatives.items() if self.has_room(needed))

    def has_room(self, needed: int) -> bool:
        """Whether the device has so many bytes."""
        return self.memory is None or needed <= self.memory

    def __str__(self) -> str:
        width = max(len(name) for name in (*self.parts, *self.alternatives, "memory of the device", LATER))
        has = "unknown" if self.memory is None else human(self.memory)
        lines = [f"{self.method} on {self.device}"]
        lines += [f"  {name:<{width}}  {human(needed):>8}" for name, needed in self.parts.items()]
        lines += [f"  {'total':<{width}}  {human(self.total):>8}  {'fits' if self.fits else 'does not fit'}"]
        lines += [f"  {'memory of the device':<{width}}  {has:>8}"]
        if self.predictions:
            lines.append(f"  {LATER:<{width}}  {human(self.predictions):>8}")
        if self.alternatives:
            lines.append("in all with")
        for name, needed in self.alternatives.items():
            lines.append(
                f"  {name:<{width}}  {human(needed):>8}  {'fits' if self.has_room(needed) else 'does not fit'}"
            )
        return "\n".join(lines)


def plan(method: Method, joint: Target, data: object) -> Plan:
    """What `infer(method, joint, data)` will take, within a factor of about two; nothing is run or allocated.

    The network is run on a few rows to see how it uses its weights. Memory that torch and Python take for themselves,
    some hundred MB, is not in it.

    >>> import torch
    >>> from posterity.likelihoods import Categorical
    >>> from posterity.methods import Laplace
    >>> from posterity.networks import MLP
    >>> from posterity.priors import Normal
    >>> joint = Joint(MLP([784, 100, 10]), Categorical(), Normal(), num_data=60_000)
    >>> rows = (torch.zeros(1, 784).expand(60_000, 784), torch.zeros(60_000, dtype=torch.int64))
    >>> found = plan(Laplace(), joint, rows)
    >>> found.fits, found.alternatives["structure=Full()"] > 1e11
    (True, True)
    """
    _refuse_bad_arguments(method, joint)
    rows = as_data(data)
    if isinstance(joint, Joint):
        if rows.num_data != joint.num_data:
            raise BadData(
                f"Joint.num_data is {joint.num_data} but the data have {rows.num_data} rows. "
                f"Make the Joint with num_data={rows.num_data}."
            )
        joint.example_output(rows.first())
    elif not isinstance(rows, NoData):
        raise BadData("A Density has its data inside. Pass None as the data.")
    parts, others = method.bytes(joint, rows), method.alternatives(joint, rows)
    held = data_bytes(rows)
    return Plan(
        method.describe(joint, rows),
        str(joint.device),
        {"data": held, **parts} if held else parts,
        memory.device_memory(joint.device),
        {name: held + needed for name, needed in others.items()},
        method.prediction_bytes(joint, rows, ROWS),
    )


def _refuse_bad_arguments(method: object, joint: object) -> None:
    if not isinstance(method, Method):
        hint = f" Call it: {method.__name__}()." if isinstance(method, type) else ""
        raise TypeError(f"plan: the first argument must be a Method. Got {shown(method)}.{hint}")
    if not isinstance(joint, (Joint, Density)):
        raise TypeError(f"plan: the problem must be a Joint or a Density. Got {shown(joint)}.")


def refuse_too_large(method: Method, joint: Target, data: Data, members: int = 1) -> None:
    """A ValueError where a run takes more than the device has, which names the best setting that fits.

    `members` is how many weight vectors run at once, where they are not those of the joint, which counts its own.
    """
    there = memory.device_memory(joint.device)
    if there is None:
        return
    times = 1 if joint.num_members is not None else members
    held = data_bytes(data)
    needed = held + times * sum(method.bytes(joint, data).values())
    if needed <= there:
        return
    if members > 1:
        raise ValueError(
            f"{method.describe(joint, data)} with {members:,} members needs about {_gigabytes(needed)}, and "
            f"{joint.device} has {_gigabytes(there)}. Run fewer members at a time, or use a smaller batch_size."
        )
    found = plan(method, joint, data)
    what = f"{found.method} needs about {_gigabytes(found.total)}"
    remedy = "Use fewer weights, fewer rows or a smaller batch_size."
    if found.fitting:
        best = found.fitting[0]
        remedy = f"Use {best}, which needs {_gigabytes(found.alternatives[best])}."
    raise ValueError(f"{what}, and {joint.device} has {_gigabytes(there)}. {remedy}")


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.{2 if count < 1e8 else 3}g} GB"
