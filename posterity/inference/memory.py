"""Plans: the memory and the time that a run takes, and what the machine has, before anything is allocated."""

import os
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from posterity.errors import positive_whole
from posterity.inference.allocations import batch_bytes, gradient_bytes
from posterity.inference.costs import Time, estimate
from posterity.inference.method import PREDICTED_ROWS, Method, check_arguments, with_passes
from posterity.model.batch import Inputs, map_inputs, num_rows
from posterity.model.data import Data, NoData, TensorData
from posterity.model.passes import Precision
from posterity.model.problem import Problem, data_of
from posterity.optim.optimizer import Optimizer
from posterity.processes import active

LATER = f"later, predictions at {PREDICTED_ROWS:,} rows"

# Memory limits of a Linux container, in both versions of control groups.
LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def device_memory(device: torch.device) -> int | None:
    """Return the bytes of memory of the device, or the limit of the container; None if unknown."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    try:
        limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    except (AttributeError, ValueError, OSError):  # not a POSIX system
        return None
    for path in LIMITS:
        with suppress(OSError, ValueError):  # no such file, or "max"
            limits.append(int(path.read_text()))
    return min(limits)


def human(count: int) -> str:
    """Format a number of bytes for people.

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
    """Return the bytes of the entries of the tensors."""
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors)


def data_bytes(data: Data) -> int:
    """Return the bytes of the rows in memory at once: all of them, or the first batch of a stream."""
    return 0 if isinstance(data, NoData) else tensor_bytes(list(data.first().tensors.values()))


def fit_bytes(
    optimizer: Optimizer, joint: Problem, data: Data, batch_size: int | None, size: int | None = None
) -> dict[str, int]:
    """Return the bytes of the optimiser's state for this size (None: theta's), and of a batch with its activations."""
    like = torch.empty(joint.size if size is None else size, dtype=joint.dtype, device="meta")
    return {
        "optimiser": (joint.num_members or 1) * tensor_bytes(list(optimizer.init(like))),
        "activations of a batch": batch_bytes(data, batch_size) + gradient_bytes(joint, data, batch_size),
    }


def first_rows(data: Data, number: int, device: torch.device) -> Inputs:
    """Return the inputs of the first rows on the device; they repeat where there are fewer."""
    given = data.first().member(0).inputs
    indices = [index % num_rows(given) for index in range(number)]
    return map_inputs(lambda tensor: tensor[indices].to(device), given)


def activation_bytes(joint: Problem, data: Data, rows: int | None) -> int:
    """Return the bytes that a forward pass of this many rows (None: all) keeps for the backward pass.

    They are measured by running the network on two rows and on three.
    """
    if joint.network is None:
        return 0
    network = joint.network.member(0)
    count = min(data.num_data, data.num_data if rows is None else rows, network.passes.micro_batch or data.num_data)
    kept = []
    for inputs in (first_rows(data, number, joint.device) for number in (2, 3)):
        leaves = [view.detach().requires_grad_() for view in network.views(network.initial)]
        own = {leaf.untyped_storage().data_ptr() for leaf in leaves}
        seen: dict[int, int] = {}

        def note(tensor: Tensor, own: set[int] = own, seen: dict[int, int] = seen) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                seen[storage.data_ptr()] = storage.nbytes()
            return tensor

        hooks = torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)
        with torch.enable_grad(), network.without_dropout(inputs), hooks:
            outputs, _ = network.run(leaves, inputs, train=True)
        kept.append(sum(seen.values()) + tensor_bytes([outputs]))
    return (joint.num_members or 1) * max(0, kept[1] - kept[0]) * count


@dataclass(frozen=True)
class Plan:
    """The bytes of a run by purpose on one device, and the memory of the device.

    `world_size` is the number of devices that share the work; each has all rows and weights, and its part of every
    batch. `method` names the method and its settings. `alternatives` are other settings for the same problem with
    their total bytes, best first. `predictions` are the bytes of later predictions at 1,024 rows, which are not part
    of the run. `memory` is None if unknown. `time` is an estimate of the run's time, None where it is not modelled.
    """

    method: str
    device: str
    parts: dict[str, int]
    memory: int | None = None
    alternatives: dict[str, int] = field(default_factory=dict)
    predictions: int = 0
    world_size: int = 1
    time: Time | None = None

    @property
    def total(self) -> int:
        """Bytes of all parts together."""
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        """Whether the run fits into the memory of the device; True if that is unknown."""
        return self.has_room(self.total)

    @property
    def fitting(self) -> tuple[str, ...]:
        """The alternatives that fit, best first."""
        return tuple(name for name, needed in self.alternatives.items() if self.has_room(needed))

    def has_room(self, needed: int) -> bool:
        """Return whether the device has this many bytes; True if its memory is unknown."""
        return self.memory is None or needed <= self.memory

    def __str__(self) -> str:
        width = max(len(name) for name in (*self.parts, *self.alternatives, "memory of the device", LATER))

        def line(name: str, needed: int | None, judged: bool = False) -> str:
            verdict = ("  fits" if self.has_room(needed or 0) else "  does not fit") if judged else ""
            return f"  {name:<{width}}  {'unknown' if needed is None else human(needed):>8}{verdict}"

        each = "" if self.world_size == 1 else f", on each of {self.world_size} that share the rows"
        lines = [f"{self.method} on {self.device}{each}", *(line(name, needed) for name, needed in self.parts.items())]
        lines += [line("total", self.total, judged=True), line("memory of the device", self.memory)]
        lines += [line(LATER, self.predictions)] if self.predictions else []
        lines += ["in all with"] if self.alternatives else []
        lines += [line(name, needed, judged=True) for name, needed in self.alternatives.items()]
        return "\n".join([*lines, *(["time: not modelled"] if self.time is None else self.time.lines())])


def plan(
    method: Method,
    joint: Problem,
    data: object,
    *,
    precision: Precision | None = None,
    micro_batch: int | None = None,
    world_size: int = 1,
) -> Plan:
    """Estimate the memory of `infer(method, joint, data)` at its peak, without running it.

    Parts are those of the phase of the run that takes most: on a CPU mostly within a tenth of what is measured. It is
    an upper bound for `NUTS`, whose trajectories are counted at their longest, for estimators that draw inside layers,
    and for dropout; scratch of single kernels is not counted, and on a GPU nothing was measured.

    `precision` and `micro_batch` are those of `infer`. With a `world_size` the memory is that of each of so many
    devices, between which the work on a batch is divided; rows, weights, moments and curvature are on each of them
    whole. The network is run on a few rows to see how it uses its weights. The plan has an estimate of the time too, at
    the rates of a machine that it names (docs/scale-costs.md). The memory of torch and Python themselves, some hundred
    MB, is not counted.

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
    positive_whole("plan: world_size", world_size)
    rows = data_of(joint, data)
    joint.check_rows(rows)
    method = method.settled(joint, rows)
    joint = with_passes(method, joint, rows, precision, micro_batch)
    held = data_bytes(rows)
    method, rows = _divided(method, rows, world_size)
    footprint = method.footprint(joint, rows)
    others = {name: held + other.footprint(joint, rows).total for name, other in footprint.alternatives().items()}
    parts = {"data": held, **footprint.parts} if held else {**footprint.parts}
    memory = device_memory(joint.device)
    modelled = isinstance(rows, TensorData) and precision is None  # the rates are of rows in memory
    time = estimate(method.work(joint, rows) if modelled else None, joint.device.type, world_size)
    return Plan(footprint.words, str(joint.device), parts, memory, others, footprint.predictions, world_size, time)


def _divided(method: Method, data: Data, world_size: int) -> tuple[Method, Data]:
    """The method with the batch of one device, and the rows that it works on in a pass, rounded up."""
    if world_size == 1:
        return method, data
    if isinstance(data, TensorData):
        count, axis = -(-data.num_data // world_size), data.rows.rows_axis
        data = replace(data, rows=data.rows.map(lambda tensor: tensor.narrow(axis, 0, count)))
    return _with_batch_of(method, world_size), data


def _with_batch_of(method: Method, world_size: int) -> Method:
    """The method, and those inside it, with the batch of one device."""
    changes: dict[str, Any] = {}
    for own in fields(method):  # type: ignore[arg-type]  # methods are dataclasses
        value = getattr(method, own.name)
        if isinstance(value, Method):
            changes[own.name] = _with_batch_of(value, world_size)
        elif own.name == "batch_size" and isinstance(value, int):
            changes[own.name] = -(-value // world_size)
    return replace(method, **changes) if changes else method  # type: ignore[type-var]


def refuse_too_large(method: Method, joint: Problem, data: Data, members: int = 1) -> None:
    """Raise a ValueError, which names the best setting that fits, if a run takes more memory than the device has.

    `members` is the number of weight vectors that run at once, for a joint without members. Active processes divide the
    work, as in a `plan` of so many devices.
    """
    memory = device_memory(joint.device)
    if memory is None:
        return
    held, processes = data_bytes(data), active()
    method, data = _divided(method, data, 1 if processes is None else processes.size)
    footprint = method.footprint(joint, data)
    needed = held + (1 if joint.num_members is not None else members) * footprint.total
    if needed <= memory:
        return
    what, remedy = footprint.words, "Use fewer weights, fewer rows or a smaller batch_size."
    if members > 1:
        what, remedy = f"{what} with {members:,} members", "Run fewer members at a time, or use a smaller batch_size."
    else:
        for name, other in footprint.alternatives().items():
            less = held + other.footprint(joint, data).total
            if less <= memory:
                remedy = f"Use {name}, which needs {_gigabytes(less)}."
                break
    has = f"{joint.device} has {_gigabytes(memory)}"
    raise ValueError(f"{what} needs about {_gigabytes(needed)}, and {has}. {remedy}")


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.{2 if count < 1e8 else 3}g} GB"
