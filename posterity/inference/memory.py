"""How much memory a run takes, and what the machine has, before anything is allocated.

A process that runs out of memory dies without a word.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from posterity.inference.method import PREDICTED_ROWS, Method, check_arguments
from posterity.model.batch import Inputs, map_inputs, num_rows
from posterity.model.data import Data, NoData, as_data
from posterity.model.problem import Problem
from posterity.optim.optimizer import Optimizer

LATER = f"later, predictions at {PREDICTED_ROWS:,} rows"

# Where Linux tells what a container may use, in its two versions of control groups.
LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def device_memory(device: torch.device) -> int | None:
    """Bytes of memory that the device has in all, or a container may use; None where that cannot be told."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    try:
        there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not a POSIX system
        return None
    return min([there, *(limit for path in LIMITS if (limit := _number(path)) is not None)])


def _number(path: Path) -> int | None:
    """The whole number in a file, None where there is none."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no such file, or "max"
        return None


def human(count: int) -> str:
    """Bytes as people write them.

    >>> human(2_300_000_000), human(512)
    ('2.3 GB', '512 B')
    """
    value, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB", "PB"):
        if value < 999.5:
            break
        value, unit = value / 1000.0, larger
    return f"{value:.0f} {unit}" if unit == "B" or value >= 9.95 else f"{value:.1f} {unit}"


def tensor_bytes(tensors: list[Tensor]) -> int:
    """What the entries of the tensors take."""
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors)


def data_bytes(data: Data) -> int:
    """Bytes of the rows that are in memory at once: all of them, or the first batch of a stream."""
    return 0 if isinstance(data, NoData) else tensor_bytes(list(data.first().tensors.values()))


def fit_bytes(
    optimizer: Optimizer, joint: Problem, data: Data, batch_size: int | None, size: int | None = None
) -> dict[str, int]:
    """Bytes of the optimiser's state for a vector of this size (None: theta), and of a batch's forward and backward."""
    like = torch.empty(joint.size if size is None else size, dtype=joint.dtype, device="meta")
    return {
        "optimiser": (joint.num_members or 1) * tensor_bytes(list(optimizer.init(like))),
        "activations of a batch": 2 * activation_bytes(joint, data, batch_size),
    }


def activation_bytes(joint: Problem, data: Data, rows: int | None) -> int:
    """What a forward pass of this many rows (None: all) keeps for the backward pass.

    It is found by running the network on two rows and on three.
    """
    if joint.network is None:
        return 0
    batch = data.first().member(0)
    count = min(data.num_data, data.num_data if rows is None else rows)
    few = [_repeated(batch.inputs, number, joint.device) for number in (2, 3)]
    network = joint.network.member(0)
    kept = []
    for inputs in few:
        leaves = [view.detach().requires_grad_() for view in network.views(network.initial)]
        own = {leaf.untyped_storage().data_ptr() for leaf in leaves}
        seen: dict[int, int] = {}

        def note(tensor: Tensor, own: set[int] = own, seen: dict[int, int] = seen) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                seen[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            outputs, _ = network.run(leaves, inputs, train=True)
        kept.append(sum(seen.values()) + tensor_bytes([outputs]))
    return (joint.num_members or 1) * max(0, kept[1] - kept[0]) * count


def _repeated(inputs: Inputs, number: int, device: torch.device) -> Inputs:
    """As many rows, from the first on and again where there are fewer."""
    places = [index % num_rows(inputs) for index in range(number)]
    return map_inputs(lambda tensor: tensor[places].to(device), inputs)


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


def plan(method: Method, joint: Problem, data: object) -> Plan:
    """What `infer(method, joint, data)` will take, within a factor of about two; nothing is run or allocated.

    The network is run on a few rows to see how it uses its weights. Memory that torch and Python take for themselves,
    some hundred MB, is not in it.

    >>> from posterity.likelihoods import Categorical
    >>> from posterity.methods import Laplace
    >>> from posterity.model import Joint
    >>> from posterity.networks import MLP
    >>> from posterity.priors import Normal
    >>> joint = Joint(MLP([784, 100, 10]), Categorical(), Normal(), num_data=60_000)
    >>> rows = (torch.zeros(1, 784).expand(60_000, 784), torch.zeros(60_000, dtype=torch.int64))
    >>> needed = plan(Laplace(), joint, rows)
    >>> needed.fits, needed.alternatives["structure=Full()"] > 1e11
    (True, True)
    """
    check_arguments("plan", method, joint)
    rows = as_data(data)
    joint.check_rows(rows)
    footprint, held = method.footprint(joint, rows), data_bytes(rows)
    others = {name: held + other.footprint(joint, rows).total for name, other in footprint.alternatives().items()}
    parts = {"data": held, **footprint.parts} if held else {**footprint.parts}
    memory = device_memory(joint.device)
    return Plan(footprint.words, str(joint.device), parts, memory, others, footprint.predictions)


def refuse_too_large(method: Method, joint: Problem, data: Data, members: int = 1) -> None:
    """A ValueError where a run takes more than the device has, which names the best setting that fits.

    `members` is how many weight vectors run at once, where they are not those of the joint, which counts its own.
    """
    there = device_memory(joint.device)
    if there is None:
        return
    footprint, held = method.footprint(joint, data), data_bytes(data)
    needed = held + (1 if joint.num_members is not None else members) * footprint.total
    if needed <= there:
        return
    what, remedy = footprint.words, "Use fewer weights, fewer rows or a smaller batch_size."
    if members > 1:
        what, remedy = f"{what} with {members:,} members", "Run fewer members at a time, or use a smaller batch_size."
    else:
        for name, other in footprint.alternatives().items():
            less = held + other.footprint(joint, data).total
            if less <= there:
                remedy = f"Use {name}, which needs {_gigabytes(less)}."
                break
    has = f"{joint.device} has {_gigabytes(there)}"
    raise ValueError(f"{what} needs about {_gigabytes(needed)}, and {has}. {remedy}")


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.{2 if count < 1e8 else 3}g} GB"
