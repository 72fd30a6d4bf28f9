"""Effective sample sizes and Monte Carlo standard errors."""

import math

import torch
from torch import Tensor

from posterity.diagnostics.rhat import check_probability, of_each, quantile, rank_normalised, split
from posterity.special.functions import beta_quantile

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


_ONE_DEVIATION = (0.1586553, 0.8413447)  # P(z <= -1) and P(z <= 1), with ArviZ's digits


def mcse_mean(draws: Tensor) -> Tensor:
    """Standard error of the mean of draws (C, D) or (C, D, *event), as (*event,): sd / sqrt(mean_ess).

    The mean and variance must exist. NaN for fewer than 4 draws and where a draw is not finite; 0 for equal draws.

    >>> from posterity.numerics import Key
    >>> print(f"{mcse_mean(Key(0).normal((4, 2500), torch.float64)):.3f}")
    0.010
    """
    return of_each("mcse_mean", draws, lambda part: part.flatten(1).std(-1) / ess(split(part)).sqrt())


def mcse_sd(draws: Tensor) -> Tensor:
    """Standard error of the standard deviation of draws (C, D) or (C, D, *event), as (*event,).

    With d = (x - mean)^2 and the delta method, sqrt(Var(d) / ESS(d) / mean(d)) / 2; no normality is assumed, four
    moments must exist. NaN for fewer than 4 draws, equal draws, and where a draw is not finite. (The ESS is that of
    d, as in Stan's `posterior`; arviz-stats takes that of x.)
    """
    return of_each("mcse_sd", draws, _sd_error)


def mcse_quantile(draws: Tensor, p: float) -> Tensor:
    """Standard error of the p-quantile of draws (C, D) or (C, D, *event), as (*event,).

    **Math**: with S = quantile_ess(draws, p) the probability of the estimated quantile is Beta(S p + 1,
    S (1 - p) + 1); half the distance between the order statistics at its 16 % and 84 % points is given.

    **Limit**: NaN for fewer than 4 draws and where a draw is NaN. Never below half the gap between order
    statistics, so rough for few draws.

    **Cost**: three sorts of the C D draws and a fast Fourier transform, in pieces of bounded memory.

    **References**: Vehtari et al. (2021), section 4.4.

    **Example**:

    >>> from posterity.numerics import Key
    >>> draws = Key(0).normal((4, 2500), torch.float64)
    >>> print(f"{mcse_quantile(draws, 0.5):.3f}")  # sqrt(pi / 2) / 100 = 0.0125
    0.013
    """
    check_probability("mcse_quantile", p)
    return of_each("mcse_quantile", draws, lambda part: _quantile_error(part, p))


def mcse_median(draws: Tensor) -> Tensor:
    """Standard error of the median of draws (C, D) or (C, D, *event), as (*event,): `mcse_quantile` at 1/2."""
    return mcse_quantile(draws, 0.5)


def _sd_error(draws: Tensor) -> Tensor:
    distance = squared_distance(draws)
    flat = distance.flatten(1)
    mean = flat.mean(-1)
    spread = flat.square().mean(-1) - mean.square()
    return (spread / ess(split(distance)) / mean / 4.0).sqrt()


def _quantile_error(draws: Tensor, p: float) -> Tensor:
    size = ess(split(at_most(draws, p)))
    ordered = draws.flatten(1).sort(dim=-1).values
    count = ordered.shape[1]
    low, high = (count * beta_quantile(one, size * p + 1.0, size * (1.0 - p) + 1.0) - 1.0 for one in _ONE_DEVIATION)
    places = torch.stack([low.clamp(min=0.0).floor(), high.clamp(max=count - 1.0).ceil()], -1).long()
    ends = ordered.gather(-1, places)
    return (ends[:, 1] - ends[:, 0]) / 2.0
