"""What fits the machine, before it is tried: a process that runs out of memory dies without a word."""

import os
from pathlib import Path

import torch
from torch import Tensor

from posterity.model.batch import Inputs, map_inputs, num_rows
from posterity.model.data import Data, NoData
from posterity.model.density import Density
from posterity.model.joint import Joint
from posterity.optim.optimizer import Optimizer

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


def count_members(joint: Joint | Density) -> int:
    """How many members the problem has, 1 where it has no member axis."""
    return (joint.num_members or 1) if isinstance(joint, Joint) else 1


def theta_bytes(joint: Joint | Density) -> int:
    """What theta takes, (P,) or, where the problem has members, (M, P)."""
    return count_members(joint) * joint.size * joint.dtype.itemsize


def moment_bytes(optimizer: Optimizer, joint: Joint | Density, size: int) -> int:
    """What the optimiser keeps for a vector of this size, for each member."""
    like = torch.empty(size, dtype=joint.dtype, device="meta")
    return count_members(joint) * tensor_bytes(list(optimizer.init(like)))


def data_bytes(data: Data) -> int:
    """What the rows take that are in memory at once: all of them, or the first batch of a stream."""
    return 0 if isinstance(data, NoData) else tensor_bytes(list(data.first().tensors.values()))


def activation_bytes(joint: Joint | Density, data: Data, rows: int | None) -> int:
    """What a forward pass of this many rows (None: all) keeps for the backward pass.

    It is found by running the network on two rows and on three.
    """
    if not isinstance(joint, Joint) or isinstance(data, NoData):
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
