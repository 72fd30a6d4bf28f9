"""The stages of a method: the problem of each, and the threads that a small network needs."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from posterity.model import Joint

SMALL = 10_000_000  # multiplications in one forward pass of a batch


def usual_kl_weight(joint: Joint, *, classifies: bool) -> float:
    """What mean-field multiplies its KL with where nobody says: 1, for classes rows / (2 weights) if that is less.

    With more means and scales than rows the KL outweighs the data, and the optimum is near the prior. See
    `Tempering.balanced`, with means and scales as its units. It is 1 for regression, where a power of the likelihood
    would only be taken for less noise.
    """
    return min(1.0, joint.num_data / (2 * joint.num_weights)) if classifies else 1.0


@contextmanager
def threads(work: int, count: int | None = None) -> Iterator[None]:
    """Let torch use `count` threads; None is one for little `work` (multiplications), else as many as before.

    Threads of a small network wait for each other longer than they work. Somebody who sets OMP_NUM_THREADS is left
    alone where no count is given.
    """
    before = torch.get_num_threads()
    if count is None and work < SMALL and "OMP_NUM_THREADS" not in os.environ:
        count = 1
    torch.set_num_threads(before if count is None else count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
