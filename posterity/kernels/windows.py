"""When a warm-up learns the mass matrix, and the moments it learns it from."""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

FIRST, LAST, BASE = 75, 50, 25  # transitions before, after and in the first window of a long warm-up
SETTLING = 5  # transitions in which a step size comes down from the first, upward pull of its search
SHORTEST = 20  # a shorter warm-up learns the step size alone
FEW = 4  # so many chains or fewer that learn together learn no sooner than one
SOONEST, LEAST = 20, 5  # FIRST and BASE of a great many chains


@lru_cache
def windows(warmup: int, chains: int = 1) -> tuple[int, tuple[int, ...]]:
    """(first transition whose draws count, transitions after which the mass matrix is made anew) of a warm-up.

    Windows double in length, each beginning from nothing, so that early draws are forgotten; before and after them
    only the step size is learnt. Many `chains` that learn together have enough draws sooner: theirs begin earlier and
    are shorter. A warm-up too short for that is shared out as 15 %, 75 %, 10 %,
    the last of at least 5 transitions.

    >>> windows(1000)
    (75, (100, 150, 250, 450, 950))
    >>> windows(200, chains=16)
    (20, (26, 38, 62, 150))
    >>> windows(100)
    (15, (90,))
    >>> windows(10)
    (10, ())
    """
    if warmup < SHORTEST:
        return warmup, ()
    share = FEW / max(FEW, chains)
    first, last, length = max(SOONEST, int(share * FIRST)), LAST, max(LEAST, int(share * BASE))
    if warmup < first + last + length:
        first, last = int(0.15 * warmup), max(SETTLING, int(0.1 * warmup))
        length = warmup - first - last
    stop = warmup - last
    ends, end = [], first
    while end < stop:
        end += length
        length *= 2
        if end + length > stop:  # too short a window would be left
            end = stop
        ends.append(end)
    return first, tuple(ends)


class Moments(NamedTuple):
    """Number, mean (G, P) and scatter about it, (G, P) or (G, P, P), of the positions of groups of chains."""

    number: Tensor
    mean: Tensor
    scatter: Tensor


def with_positions(moments: Moments, positions: Tensor) -> Moments:
    """The moments with positions (C, P) more, C / G to each group."""
    groups = moments.mean.shape[0]
    rows = positions.reshape(groups, -1, positions.shape[-1])  # (G, C / G, P)
    more = rows.shape[1]
    number = moments.number + more
    mean = rows.mean(1)
    away, shift = rows - mean.unsqueeze(1), mean - moments.mean
    weight = moments.number * more / number
    if moments.scatter.dim() == 2:
        scatter = moments.scatter + away.square().sum(1) + weight * shift.square()
    else:
        scatter = moments.scatter + away.mT @ away + weight * shift.unsqueeze(2) * shift.unsqueeze(1)
    return Moments(number, moments.mean + shift * (more / number), scatter)


def no_moments(like: Tensor) -> Moments:
    """Those of nothing, for a scale like this one, (G, P) or (G, P, P)."""
    return Moments(
        torch.zeros((), dtype=like.dtype, device=like.device),
        torch.zeros_like(like[..., 0] if like.dim() == 3 else like),
        torch.zeros_like(like),
    )
