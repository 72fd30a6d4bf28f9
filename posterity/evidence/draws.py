"""Log densities of all data at many draws of the weights."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from posterity.errors import BadData
from posterity.model.checked import checked
from posterity.model.data import Data, TensorData, as_data
from posterity.model.density import Density
from posterity.model.joint import Joint
from posterity.model.network import Buffers
from posterity.numerics.random import Key
from posterity.posteriors.pointwise import TOGETHER, batches

LARGE = 1 << 26  # numbers in the draws that are held at a time

Sampler = Callable[[int, Key], Tensor]


def whole(joint: Joint | Density, data: object) -> Data:
    """All data of the problem on its device, checked; BadData where they do not fit."""
    rows = as_data(data).to(joint.device)
    if isinstance(rows, TensorData) and rows.rows.per_member:
        raise BadData("The evidence is that of one data set. Pass the rows of one member, without a member axis.")
    return checked(joint, rows)


def in_blocks(sample: Sampler, draws: int, size: int, key: Key) -> Iterator[Tensor]:
    """Draws (s, P) of `size` = P numbers each, as many at a time as are not too large together."""
    step = max(1, LARGE // max(1, size))
    for low in range(0, draws, step):
        yield sample(min(step, draws - low), key.fold(low))


def log_likelihoods(joint: Joint | Density, thetas: Tensor, data: Data, buffers: Buffers) -> Tensor:
    """sum_n w_n log p(y_n | f(x_n)) over all data at weights (S, P), untempered: (S,) in float64.

    Of a `Density` it is the whole log density, which does not tell data from prior.
    """
    if isinstance(joint, Density):
        return joint.log_density(thetas).to(torch.float64)
    total = torch.zeros(len(thetas), dtype=torch.float64, device=thetas.device)
    for batch in batches(data):
        share, step = batch.size / joint.num_data, max(1, TOGETHER // batch.size)
        for low in range(0, len(thetas), step):
            some = thetas[low : low + step]
            part = joint.log_likelihood(some[0] if step == 1 else some, batch, buffers or None)
            total[low : low + step] += part.to(torch.float64) * share
    return total
