"""The log-likelihood of each row at many draws."""

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from posterity.errors import BadData
from posterity.model.checked import checked
from posterity.model.data import Batch, Data, TensorData, as_data
from posterity.model.density import Density
from posterity.model.inputs import Inputs
from posterity.model.joint import Joint
from posterity.model.network import Buffers

ROWS = 1024  # of data at a time: bounds the memory
TOGETHER = 1 << 14  # rows times draws that go through the network in one call

Blocks = Callable[[int], Iterable[tuple[Tensor, Buffers]]]  # draws (s, P) with their buffers, at most so many at a time


def batches(data: Data) -> Iterator[Batch]:
    """All rows once, some at a time."""
    for batch in data.passes(ROWS).from_step(0):
        assert isinstance(batch, Batch)
        yield batch


def pointwise_log_likelihoods(joint: Joint | Density, blocks: Blocks, data: object) -> Tensor:
    """w_n log p(y_n | f(x_n)) of each row at each draw, untempered: (S, N) in float64 on the CPU."""
    rows = checked(joint, as_data(data).to(joint.device))
    with torch.no_grad():
        if isinstance(joint, Density):
            return torch.cat([joint.log_likelihoods(theta).double().cpu() for theta, _ in blocks(ROWS)])
        if isinstance(rows, TensorData) and rows.rows.per_member:
            raise BadData("log_likelihoods: pass the rows of one problem, and take its chain: q.chain(0).")
        found = []
        for batch in batches(rows):
            step = max(1, TOGETHER // batch.size)
            found.append(torch.cat([_at(joint, theta, batch, buffers).cpu() for theta, buffers in blocks(step)]))
        return torch.cat(found, dim=1)


def outputs_at(joint: Joint, theta: Tensor, inputs: Inputs, buffers: Buffers) -> Tensor:
    """Network outputs (s, n, *event) at draws (s, P); a single one goes the way of one theta, which is quicker."""
    if len(theta) > 1:
        return joint.outputs(theta, inputs, buffers or None)
    own = {name: buffer[0] for name, buffer in buffers.items()}
    return joint.outputs(theta[0], inputs, own or None).unsqueeze(0)


def _at(joint: Joint, theta: Tensor, batch: Batch, buffers: Buffers) -> Tensor:
    """(s, n) in float64."""
    outputs = outputs_at(joint, theta, batch.inputs, buffers).double()
    likelihood = joint.likelihood.with_free(joint.split(theta)[1].double())
    each = likelihood.log_prob(outputs, batch.targets)
    return each if batch.weights is None else each * batch.weights
