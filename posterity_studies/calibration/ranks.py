"""Ranks of true values among draws, and whether they are uniform."""

import torch
from torch import Tensor

from posterity.numerics.random import Key

FEWEST = 5  # replicates expected in a bin, below which chi-square says little
MOST = 20  # bins


def ranks_of(truth: Tensor, draws: Tensor, key: Key) -> Tensor:
    """How many of S draws (R, S) lie below the true values (R,), 0 to S; ties fall at random.

    >>> ranks_of(torch.tensor([0.5, 9.0]), torch.tensor([[0.1, 0.4, 0.9], [1.0, 2.0, 3.0]]), Key(0))
    tensor([2, 3])
    """
    below = (draws < truth.unsqueeze(1)).sum(1)
    equal = (draws == truth.unsqueeze(1)).sum(1)
    coin = key.uniform(tuple(truth.shape), torch.float64, truth.device)
    return below + (coin * (equal + 1)).long()


def number_of_bins(replicates: int, draws: int) -> int:
    """The most bins of equal numbers of ranks, up to `MOST`, in each of which `FEWEST` replicates are expected.

    >>> number_of_bins(1000, 63), number_of_bins(100, 63), number_of_bins(1000, 99)
    (16, 16, 20)
    """
    limit = min(MOST, replicates // FEWEST)
    fitting = [bins for bins in range(2, limit + 1) if (draws + 1) % bins == 0]
    if not fitting:
        raise ValueError(
            f"calibrate: {draws + 1} ranks of {replicates} replicates cannot be put into 2 to {MOST} equal bins of at "
            f"least {FEWEST} each. Use draws such that draws + 1 has divisors, such as 63, or more replicates."
        )
    return fitting[-1]


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
