"""Effective sample size: how many independent draws would tell as much as those of the chains."""

import math

import torch
from torch import Tensor

from posterity.diagnostics.chains import check_probability, of_each, quantile, rank_normalised, split

_STILL = 1e-15  # range of draws below which they count as equal, as in ArviZ


def bulk_ess(draws: Tensor) -> Tensor:
    """Effective sample size of draws (C, D) or (C, D, *event) for the middle of their distribution, as (*event,).

    **Math**: that of z, the normal scores of the ranks of all draws, in half chains. With M half chains of n draws,
    mean variance W, variance of their means B / n, mean autocovariance c_t and V = W (n - 1) / n + B / n,

        rho_t = 1 - (W - c_t) / V,    ESS = M n / tau,    tau = -1 + 2 sum_t rho_t.

    The sum runs over pairs rho_2k + rho_2k+1 as long as they are positive, each made no larger than the one before
    (Geyer's initial monotone sequence), and the even term after them counts once. ESS is at most
    M n log10(M n), which antithetic chains reach.

    **Limit**: NaN for fewer than 4 draws or a draw that is NaN; M n for draws whose range is below 1e-15, which
    say nothing (ArviZ's conventions). Where a pair is 0 up to rounding, as happens with indicators of very few draws,
    the sum may end there or not. 100 for each chain are wanted before R-hat and standard errors can be relied on.

    **Cost**: a sort and a fast Fourier transform of the C D draws, in pieces of bounded memory.

    **References**: Geyer (1992), Practical Markov chain Monte Carlo; Vehtari et al. (2021).

    **Example**:

    >>> from posterity.numerics import Key
    >>> noise = Key(0).normal((4, 500), torch.float64)
    >>> walk = noise.cumsum(1)
    >>> print(f"{bulk_ess(noise):.0f}, {bulk_ess(walk):.0f}")
    1909, 6
    """
    return of_each("bulk_ess", draws, lambda part: ess(rank_normalised(split(part))))


def tail_ess(draws: Tensor) -> Tensor:
    """Effective sample size in the tails: the smaller one of those for the 5 % and 95 % quantiles.

    Draws (C, D) or (C, D, *event) give (*event,). Limits as those of `bulk_ess`.
    """
    return torch.minimum(quantile_ess(draws, 0.05), quantile_ess(draws, 0.95))


def quantile_ess(draws: Tensor, p: float) -> Tensor:
    """Effective sample size for the p-quantile: that of the indicators [x <= quantile], which may be all equal.

    Draws (C, D) or (C, D, *event) give (*event,). Limits as those of `bulk_ess`.
    """
    check_probability("quantile_ess", p)
    return of_each("quantile_ess", draws, lambda part: ess(split(at_most(part, p))))


def mean_ess(draws: Tensor) -> Tensor:
    """Effective sample size for the mean, which must exist: draws (C, D) or (C, D, *event) give (*event,).

    That of the draws as they are, in half chains. Limits as those of `bulk_ess`, and NaN where a draw is infinite.
    """
    return of_each("mean_ess", draws, lambda part: ess(split(part)))


def sd_ess(draws: Tensor) -> Tensor:
    """Effective sample size for the standard deviation: that of (x - mean)^2, in half chains.

    Draws (C, D) or (C, D, *event) give (*event,). Limits as those of `mean_ess`.
    """
    return of_each("sd_ess", draws, lambda part: ess(split(squared_distance(part))))


def at_most(draws: Tensor, p: float) -> Tensor:
    """Whether each draw is at most the p-quantile of all, as numbers 0 and 1, (K, C, D)."""
    return (draws <= quantile(draws, p)[:, None, None]).to(draws.dtype)


def squared_distance(draws: Tensor) -> Tensor:
    """(x - mean over all chains)^2, (K, C, D)."""
    return (draws - draws.mean((-2, -1), keepdim=True)).square()


def ess(draws: Tensor) -> Tensor:
    """Effective sample size of chains as they stand, (K, C, D) -> (K,)."""
    chains, count = draws.shape[-2:]
    size = chains * count
    covariance = _autocovariance(draws).mean(-2)  # (K, D)
    within = covariance[:, :1] * count / (count - 1.0)
    total = covariance[:, :1] + draws.mean(-1).var(-1, keepdim=True)
    rho = 1.0 - (within - covariance) / total
    rho[:, 0] = torch.where(rho[:, 1].isnan(), math.nan, 1.0)
    pairs = 1 + max(0, (count - 3) // 2)  # those that ArviZ looks at
    even = rho[:, : 2 * pairs : 2]
    sums = even + rho[:, 1 : 2 * pairs : 2]  # (K, pairs)
    good = (sums > 0).cumprod(-1)
    last = good.sum(-1).clamp(max=pairs - 1)[:, None]  # the first pair that is not positive, or the last of all
    before = torch.arange(pairs, device=draws.device) < last
    total_sum = sums.cummin(-1).values.masked_fill(~before, 0.0).sum(-1)
    after = even.gather(-1, last)[:, 0]
    after = torch.where((after > 0) | (sums.gather(-1, last)[:, 0] >= 0), after, 0.0)
    tau = (2.0 * total_sum + after - 1.0).clamp(min=1.0 / math.log10(size))
    found = (size / tau).masked_fill(rho[:, 1].isnan(), math.nan)
    flat = draws.flatten(1)
    return torch.where(flat.amax(-1) - flat.amin(-1) < _STILL, float(size), found)


def _autocovariance(draws: Tensor) -> Tensor:
    """Autocovariance of each chain at every lag, each sum divided by D, (K, C, D)."""
    count = draws.shape[-1]
    length = 1 << (2 * count - 1).bit_length()
    frequencies: Tensor = torch.fft.rfft(draws - draws.mean(-1, keepdim=True), n=length)
    power = frequencies.real.square() + frequencies.imag.square()
    covariance: Tensor = torch.fft.irfft(power, n=length)[..., :count] / count
    return covariance
