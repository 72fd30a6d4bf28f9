"""R-hat: whether chains agree with each other and with their own halves."""

import torch
from torch import Tensor

from posterity.diagnostics.chains import folded, of_each, rank_normalised, split


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
