"""What the diagnostics of Markov chains share: one quantity after another, halves of chains, ranks, quantiles.

Inside, draws of K quantities are (K, C, D): chains, then draws.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from posterity.errors import shown

LEAST_DRAWS = 4  # of a chain, so that its halves have a variance
_BUDGET = 2**22  # numbers looked at together


def of_each(name: str, draws: Tensor, diagnostic: Callable[[Tensor], Tensor], *, least_chains: int = 1) -> Tensor:
    """`diagnostic`, (K, C, D) -> (K,), of every quantity of draws (C, D, *event), as (*event,) in float64.

    It is NaN where a draw is NaN, and everywhere for chains of fewer than 4 draws or fewer chains than
    `least_chains`.
    """
    if not isinstance(draws, Tensor) or draws.dim() < 2 or draws.is_complex():
        raise ValueError(f"{name} needs a tensor (chains, draws) or (chains, draws, *event). Got {shown(draws)}.")
    chains, length, *event = draws.shape
    result = torch.full((math.prod(event),), math.nan, dtype=torch.float64, device=draws.device)
    if length < LEAST_DRAWS or chains < least_chains:
        return result.reshape(event)
    flat = draws.detach().reshape(chains, length, -1)
    together = max(1, _BUDGET // (chains * length))
    for start in range(0, flat.shape[-1], together):
        part = flat[..., start : start + together].movedim(-1, 0).to(torch.float64).contiguous()  # (K, C, D)
        unknown = part.isnan().flatten(1).any(-1)
        result[start : start + together] = diagnostic(part).masked_fill(unknown, math.nan)
    return result.reshape(event)


def split(draws: Tensor) -> Tensor:
    """Both halves of each chain as chains: (K, C, D) -> (K, 2C, D // 2). The middle of an odd number is left out."""
    half = draws.shape[-1] // 2
    return torch.cat([draws[..., :half], draws[..., -half:]], dim=-2)


def rank_normalised(draws: Tensor) -> Tensor:
    """Normal scores of the ranks among all draws of a quantity, (K, C, D): ties share their mean rank, NaN stays."""
    flat = draws.flatten(1)  # (K, N)
    count = flat.shape[1]
    ordered, places = flat.sort(dim=-1)
    index = torch.arange(count, device=flat.device).expand_as(flat)
    other = ordered[:, 1:] != ordered[:, :-1]
    edge = torch.ones_like(other[:, :1])
    first = index.where(torch.cat([edge, other], -1), torch.zeros_like(index)).cummax(-1).values
    ends = index.where(torch.cat([other, edge], -1), torch.full_like(index, count - 1))
    last = ends.flip(-1).cummin(-1).values.flip(-1)
    twice = torch.arange(2.0, 2 * count + 1, dtype=flat.dtype, device=flat.device)  # all mean ranks, doubled
    table: Tensor = torch.special.ndtri((0.5 * twice - 0.375) / (count + 0.25))  # Blom's offset
    score = torch.empty_like(flat).scatter_(-1, places, table[first + last])
    return score.masked_fill(flat.isnan(), math.nan).reshape(draws.shape)


def folded(draws: Tensor) -> Tensor:
    """Distances from the median over all chains, (K, C, D)."""
    flat = draws.flatten(1)
    count = flat.shape[1]
    median = (_smallest(flat, (count + 1) // 2) + _smallest(flat, count // 2 + 1)) / 2.0
    return (draws - median[:, None, None]).abs()


def quantile(draws: Tensor, p: float) -> Tensor:
    """The p-quantile over all chains, (K, C, D) -> (K,), linear between neighbours (type 7 of Hyndman and Fan).

    Neighbours are weighted as ArviZ does, to the last bit: whether a draw counts as below hangs on it.
    """
    flat = draws.flatten(1)
    count = flat.shape[1]
    place = count * p + (1.0 - p)
    below = math.floor(min(max(place, 1.0), count - 1.0))
    weight = min(max(place - below, 0.0), 1.0)
    return (1.0 - weight) * _smallest(flat, below) + weight * _smallest(flat, below + 1)


def _smallest(flat: Tensor, place: int) -> Tensor:
    """The value at a place, from 1, in rising order: (K, N) -> (K,)."""
    return flat.kthvalue(place, dim=-1).values


def check_probability(name: str, p: float) -> None:
    """Raise a ValueError unless p is a number between 0 and 1, both left out."""
    if isinstance(p, bool) or not isinstance(p, int | float) or not 0.0 < p < 1.0:
        raise ValueError(f"{name}: p must be a number above 0 and below 1. Got {shown(p)}.")
