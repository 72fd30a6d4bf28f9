"""The default weight of mean-field's KL, and the number of threads of a fit."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from posterity.model import Joint

SMALL = 10_000_000  # multiplications in one forward pass of a batch


def usual_kl_weight(joint: Joint, *, classifies: bool) -> float:
    """Return the default factor of mean-field's KL: 1, and for classes rows / (2 weights) if that is less.

    With more means and scales than rows the KL outweighs the data, and the optimum is near the prior. See
    `Tempering.balanced`, with means and scales as its units. It is 1 for regression, where a power of the likelihood
    would only be taken for less noise.
    """
    return min(1.0, joint.num_data / (2 * joint.num_weights)) if classifies else 1.0


@contextmanager
def threads(work: int, count: int | None = None) -> Iterator[None]:
    """Set torch's number of threads to `count`; None: one for little `work` (multiplications), else unchanged.

    Threads of a small network wait for each other longer than they work. Without a `count`, OMP_NUM_THREADS has
    precedence if it is set.
    """
    before = torch.get_num_threads()
    if count is None and work < SMALL and "OMP_NUM_THREADS" not in os.environ:
        count = 1
    torch.set_num_threads(before if count is None else count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
