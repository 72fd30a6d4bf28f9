"""Gathering of rows of which each process has a part."""

import torch
from torch import Tensor

from posterity.errors import BadData
from posterity.model.batch import Batch, as_batch, batch_tensors
from posterity.model.data import TensorData
from posterity.processes import active, ended_together
from posterity.scale.group import TorchGroup


@ended_together()
def gathered(data: object) -> TensorData:
    """Return all rows, in the order of the processes, from the rows (inputs, targets[, weights]) that each one has.

    Numbers of rows may differ by process, and be 0 where the tensors have the right shape, (0, ...). A run on the
    result is that on all rows, bit for bit. Afterwards each process holds all rows in memory, since batches are drawn
    from all of them: for more rows than that, pass a `Dataset` or loader of the same files in each process.

    >>> import torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> from posterity.scale import processes
    >>> with processes():
    ...     gathered((torch.ones(3, 2), torch.zeros(3))).num_data
    3
    >>> dist.destroy_process_group()
    """
    group = active()
    if not isinstance(group, TorchGroup):
        raise RuntimeError(
            "scale.gathered needs the processes that have the rows. Call it inside scale.join() or scale.processes()."
        )
    own = as_batch(data, "the rows of this process")
    if own.per_member:
        raise BadData("scale.gathered: members share the rows. Pass them without a member axis.")
    kinds = [(name, str(tensor.dtype), tuple(tensor.shape[1:])) for name, tensor in own.tensors.items()]
    group.refuse_differing("kind of rows", repr(kinds), "give tensors of the same dtypes and row shapes, also if empty")
    counts = [int(count) for count in group.gathered(torch.tensor(own.size))]
    if not sum(counts):
        raise BadData("The data have no rows. Pass at least one in some process.")
    joined = iter([_joined(group, tensor, counts) for tensor in batch_tensors(own)])
    return TensorData(Batch(*own.map(lambda _: next(joined))[:3]))


def _joined(group: TorchGroup, own: Tensor, counts: list[int]) -> Tensor:
    """Return the rows of one tensor of all processes; all send equally many, as collectives require."""
    padded = own.new_zeros(max(counts), *own.shape[1:])
    padded[: len(own)] = own
    parts = zip(group.gathered(padded), counts, strict=True)
    return torch.cat([part[:count] for part, count in parts]).to(own.device)
