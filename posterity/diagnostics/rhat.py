"""R-hat and E-BFMI, and the preparation of chains that all diagnostics share."""

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


def rhat(draws: Tensor) -> Tensor:
    """Split rank-normalised R-hat of draws (C, D) or (C, D, *event), as (*event,): 1 for chains that agree.

    **Math**: with M = 2C half chains of n draws, means m_i and variances s_i^2, W = mean s_i^2 and B = n Var(m_i),

        R-hat = sqrt((B / W + n - 1) / n).

    It is computed for z, the normal scores of the ranks of all draws (location, whatever the tails), and for those of
    |x - median| (scale and tails); the larger is given. Below 1.01 chains are taken to agree.

    **Limit**: NaN for one chain, fewer than 4 draws, a draw that is NaN, and draws that are all equal; infinite
    where each half chain stands still and they differ. Where the median is infinite, the folded part says nothing and
    is left out. ArviZ's conventions; its variance of a chain that stands still may be 1e-32 instead of 0.

    **Cost**: two sorts of the C D draws, in pieces of bounded memory.

    **References**: Vehtari, Gelman, Simpson, Carpenter, Bürkner (2021), Rank-normalization, folding, and localization.

    **Example**:

    >>> from posterity.numerics import Key
    >>> good = Key(0).normal((4, 500))
    >>> print(f"{rhat(good):.3f}, {rhat(good + torch.arange(4.0)[:, None]):.2f}")
    1.001, 1.48
    """
    return of_each("rhat", draws, _rank_normalised_rhat, least_chains=2)


def _rank_normalised_rhat(draws: Tensor) -> Tensor:
    halves = split(draws)
    bulk, tail = _rhat(rank_normalised(halves)), _rhat(rank_normalised(folded(halves)))
    return torch.where(tail > bulk, tail, bulk)


def _rhat(draws: Tensor) -> Tensor:
    """R-hat as it stands, (K, C, D) -> (K,)."""
    count = draws.shape[-1]
    away = draws - draws[..., :1]  # exactly 0 in chains that stand still
    within = away.var(-1).mean(-1)
    between = count * draws.mean(-1).var(-1)
    return ((between / within + count - 1.0) / count).sqrt()


def e_bfmi(energy: Tensor) -> Tensor:
    """Estimated Bayesian fraction of missing information of each chain, from energies (C, D), as (C,) in float64.

    **Math**: mean_t (E_t - E_{t-1})^2 / Var(E). The change of energy between draws comes from the new momentum alone;
    where it is small beside the spread of the energy, the chain walks slowly from level to level, and tails stay
    unseen.

    **Limit**: below 0.3 (Stan warns at 0.2) the tails are not explored; about 1 to 2 is good. NaN where the energy
    stands still, is not finite, or has fewer than 2 draws.

    **Cost**: one pass over the energies.

    **References**: Betancourt (2016), Diagnosing suboptimal cotangent disintegrations in Hamiltonian Monte Carlo.

    **Example**:

    >>> import torch
    >>> e_bfmi(torch.tensor([[1.0, 2.0, 1.0, 2.0], [1.0, 2.0, 3.0, 4.0]]))
    tensor([3.0000, 0.6000], dtype=torch.float64)
    """
    if not isinstance(energy, Tensor) or energy.dim() != 2:
        raise ValueError(f"e_bfmi needs energies (chains, draws). Got {shown(energy)}.")
    energy = energy.double()
    if energy.shape[1] < 2:
        return energy.new_full(energy.shape[:1], float("nan"))
    return energy.diff(dim=1).square().mean(1) / (energy - energy[:, :1]).var(1)
