"""Ranks of true values among draws, and whether they are uniform."""

import torch
from torch import Tensor

from posterity.numerics.random import Key


def ranks_of(truth: Tensor, draws: Tensor, key: Key) -> Tensor:
    """How many of S draws (R, S) lie below the true values (R,), 0 to S; ties fall at random.

    >>> ranks_of(torch.tensor([0.5, 9.0]), torch.tensor([[0.1, 0.4, 0.9], [1.0, 2.0, 3.0]]), Key(0))
    tensor([2, 3])
    """
    below = (draws < truth.unsqueeze(1)).sum(1)
    equal = (draws == truth.unsqueeze(1)).sum(1)
    coin = key.uniform(tuple(truth.shape), torch.float64, truth.device)
    return below + (coin * (equal + 1)).long()


def counts_of(ranks: Tensor, draws: int, bins: int) -> Tensor:
    """How many ranks (R,) fall into each of the bins, (bins,)."""
    return torch.bincount(ranks.cpu() * bins // (draws + 1), minlength=bins)


def chi_square_p(counts: Tensor) -> float:
    """The probability of counts (bins,) at least as uneven, by chi-square, if all bins are alike.

    >>> round(chi_square_p(torch.tensor([60, 40])), 4)  # chi-square 4 with one degree of freedom
    0.0455
    """
    expected = counts.sum().double() / len(counts)
    statistic = (counts - expected).square().sum() / expected
    half = torch.tensor(0.5 * (len(counts) - 1), dtype=torch.float64)
    return float(torch.special.gammaincc(half, 0.5 * statistic))


def autocorrelation(draws: Tensor) -> float:
    """The correlation of neighbours among draws (R, S), pooled over the R chains; 1 if all are equal.

    What the mean of S draws takes away, 1 / S, is given back: it is 0 for independent draws.

    >>> wave = torch.tensor([[1.0, -1.0] * 50])
    >>> round(autocorrelation(wave), 2)
    -0.99
    """
    away = (draws - draws.mean(1, keepdim=True)).double()
    variance = float(away.square().mean())
    if variance == 0.0:
        return 1.0
    return min(1.0, float((away[:, 1:] * away[:, :-1]).mean()) / variance + 1.0 / draws.shape[1])
