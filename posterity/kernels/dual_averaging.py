"""Step sizes that reach a wanted rate of acceptance."""

import math
from typing import NamedTuple

import torch
from torch import Tensor


class DualAveraging(NamedTuple):
    """Search for the log of a step size: the one to try next, the average of those tried, and what leads to them."""

    log_step: Tensor
    average: Tensor
    error: Tensor
    centre: Tensor
    tried: Tensor


# The constants of Hoffman and Gelman (2014), section 3.2.1: shrinkage, delay, forgetting, and the first pull upwards.
SHRINKAGE, DELAY, FORGETTING, UPWARDS = 0.05, 10.0, 0.75, 10.0


def averaging_from(step_size: Tensor) -> DualAveraging:
    """The search from step sizes (G,)."""
    log_step, none = step_size.log(), torch.zeros_like(step_size)
    return DualAveraging(log_step, log_step, none, log_step + math.log(UPWARDS), torch.zeros_like(step_size[0]))


def averaged(search: DualAveraging, accept: Tensor, wanted: float) -> DualAveraging:
    """The search after a transition whose probability of acceptance was `accept` (G,), where `wanted` is the goal.

    **Math**: with t transitions so far, e_t = (1 - 1/(t + 10)) e_{t-1} + (wanted - accept) / (t + 10), log step =
    centre - e_t sqrt(t) / 0.05, and its average with weight t^-0.75.

    **References**: Hoffman and Gelman (2014), The no-U-turn sampler, eq. 6.

    >>> search = averaging_from(torch.ones(1))
    >>> for _ in range(1000):  # a sampler that accepts with probability exp(-step)
    ...     search = averaged(search, (-search.log_step.exp()).exp(), 0.8)
    >>> round(float((-search.average.exp()).exp()), 1)
    0.8
    """
    count = search.tried + 1.0
    share = 1.0 / (count + DELAY)
    error = (1.0 - share) * search.error + share * (wanted - accept)
    log_step = search.centre - count.sqrt() / SHRINKAGE * error
    weight = count**-FORGETTING
    average = weight * log_step + (1.0 - weight) * search.average
    return DualAveraging(log_step, average, error, search.centre, count)
