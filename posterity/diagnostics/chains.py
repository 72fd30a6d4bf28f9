"""R-hat, E-BFMI, effective sample sizes and Monte Carlo standard errors of chains."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from posterity.errors import shown
from posterity.special.functions import beta_quantile

LEAST_DRAWS = 4  # of a chain, so that its halves have a variance
_BUDGET = 2**22  # numbers processed at once
_STILL = 1e-15  # range of draws below which they count as equal, as in ArviZ
_ONE_DEVIATION = (0.1586553, 0.8413447)  # P(z <= -1) and P(z <= 1), with ArviZ's digits


def of_each(name: str, draws: Tensor, diagnostic: Callable[[Tensor], Tensor], *, least_chains: int = 1) -> Tensor:
    """Apply `diagnostic`, (K, C, D) -> (K,), to every quantity of draws (C, D, *event), as (*event,) in float64.

    The result is NaN where a draw is NaN, and for chains of fewer than 4 draws or fewer chains than `least_chains`.
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
        result[start : start + together] = diagnostic(part).masked_fill(part.isnan().flatten(1).any(-1), math.nan)
    return result.reshape(event)


def split(draws: Tensor) -> Tensor:
    """Split each chain into two: (K, C, D) -> (K, 2C, D // 2). The middle of an odd number of draws is left out."""
    half = draws.shape[-1] // 2
    return torch.cat([draws[..., :half], draws[..., -half:]], dim=-2)


def rank_normalised(draws: Tensor) -> Tensor:
    """Return normal scores of the ranks among all draws, (K, C, D); ties share their mean rank, NaN stays."""
    flat = draws.flatten(1)  # (K, N)
    count = flat.shape[1]
    ordered, order = flat.sort(dim=-1)
    index = torch.arange(count, device=flat.device).expand_as(flat)
    differs = ordered[:, 1:] != ordered[:, :-1]
    edge = torch.ones_like(differs[:, :1])
    first = index.where(torch.cat([edge, differs], -1), torch.zeros_like(index)).cummax(-1).values
    ends = index.where(torch.cat([differs, edge], -1), torch.full_like(index, count - 1))
    last = ends.flip(-1).cummin(-1).values.flip(-1)
    twice = torch.arange(2.0, 2 * count + 1, dtype=flat.dtype, device=flat.device)  # all mean ranks, doubled
    table: Tensor = torch.special.ndtri((0.5 * twice - 0.375) / (count + 0.25))  # Blom's offset
    score = torch.empty_like(flat).scatter_(-1, order, table[first + last])
    return score.masked_fill(flat.isnan(), math.nan).reshape(draws.shape)


def quantile(draws: Tensor, p: float) -> Tensor:
    """Return the p-quantile over all chains, (K, C, D) -> (K,), by linear interpolation (type 7 of Hyndman and Fan).

    Neighbours are weighted as in ArviZ, to the last bit: it decides which draws are below the quantile.
    """
    flat = draws.flatten(1)
    count = flat.shape[1]
    position = count * p + (1.0 - p)
    below = math.floor(min(max(position, 1.0), count - 1.0))
    weight = min(max(position - below, 0.0), 1.0)
    low, high = (flat.kthvalue(rank, dim=-1).values for rank in (below, below + 1))
    return (1.0 - weight) * low + weight * high


def check_probability(name: str, p: float) -> None:
    """Raise a ValueError unless p is a number strictly between 0 and 1."""
    if isinstance(p, bool) or not isinstance(p, int | float) or not 0.0 < p < 1.0:
        raise ValueError(f"{name}: p must be a number above 0 and below 1. Got {shown(p)}.")


def rhat(draws: Tensor) -> Tensor:
    """Return the split rank-normalised R-hat of draws (C, D) or (C, D, *event), as (*event,): 1 for chains that agree.

    **Math**: with M = 2C half chains of n draws, means m_i and variances s_i^2, W = mean s_i^2 and B = n Var(m_i),

        R-hat = sqrt((B / W + n - 1) / n).

    It is computed for z, the normal scores of the ranks of all draws (location, whatever the tails), and for those of
    |x - median| (scale and tails); the larger one is returned. Below 1.01 chains are taken to agree.

    **Limit**: NaN for one chain, fewer than 4 draws, a draw that is NaN, and draws that are all equal; infinite
    where each half chain is constant and they differ. Where the median is infinite, the folded part is left out.
    ArviZ's conventions; its variance of a constant chain may be 1e-32 instead of 0.

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
    flat = halves.flatten(1)
    count = flat.shape[1]
    low, high = (flat.kthvalue(rank, dim=-1).values for rank in ((count + 1) // 2, count // 2 + 1))
    folded = (halves - ((low + high) / 2.0)[:, None, None]).abs()  # distances from the median
    bulk, tail = _rhat(rank_normalised(halves)), _rhat(rank_normalised(folded))
    return torch.where(tail > bulk, tail, bulk)


def _rhat(draws: Tensor) -> Tensor:
    """Return R-hat of the chains as they are, (K, C, D) -> (K,)."""
    count = draws.shape[-1]
    away = draws - draws[..., :1]  # exactly 0 in constant chains
    within = away.var(-1).mean(-1)
    between = count * draws.mean(-1).var(-1)
    return ((between / within + count - 1.0) / count).sqrt()


def e_bfmi(energy: Tensor) -> Tensor:
    """Return the estimated Bayesian fraction of missing information of chains with energies (C, D), as (C,).

    **Math**: mean_t (E_t - E_{t-1})^2 / Var(E). The change of energy between draws comes from the new momentum alone;
    where it is small beside the spread of the energy, the chain moves slowly between energies and misses the
    tails.

    **Limit**: below 0.3 (Stan warns at 0.2) the tails are not explored; about 1 to 2 is good. NaN where the energy
    is constant, not finite, or has fewer than 2 draws.

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
        return energy.new_full(energy.shape[:1], math.nan)
    return energy.diff(dim=1).square().mean(1) / (energy - energy[:, :1]).var(1)


def bulk_ess(draws: Tensor) -> Tensor:
    """Return the effective sample size of draws (C, D) or (C, D, *event) in the bulk of the distribution, as (*event,).

    **Math**: it is computed for z, the normal scores of the ranks of all draws. With M half chains of n draws, mean
    variance W, variance of their means B / n, mean autocovariance c_t and V = W (n - 1) / n + B / n,

        rho_t = 1 - (W - c_t) / V,    ESS = M n / tau,    tau = -1 + 2 sum_t rho_t.

    The sum runs over pairs rho_2k + rho_2k+1 as long as they are positive, each made no larger than the one before
    (Geyer's initial monotone sequence), and the even term after them counts once. ESS is at most
    M n log10(M n), which antithetic chains reach.

    **Limit**: NaN for fewer than 4 draws or a draw that is NaN; M n for draws whose range is below 1e-15, which
    carry no information (ArviZ's conventions). Where a pair is 0 up to rounding, as for indicators of very few draws,
    the sum may end there or not. R-hat and standard errors are reliable from 100 for each chain on.

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
    """Return the smaller `quantile_ess` at 5 % and 95 % of draws (C, D) or (C, D, *event), as (*event,)."""
    return torch.minimum(quantile_ess(draws, 0.05), quantile_ess(draws, 0.95))


def quantile_ess(draws: Tensor, p: float) -> Tensor:
    """Return the effective sample size for the p-quantile of draws (C, D) or (C, D, *event), as (*event,).

    It is computed for the indicators [x <= quantile], which may be all equal. Limits as for `bulk_ess`.
    """
    check_probability("quantile_ess", p)
    return of_each("quantile_ess", draws, lambda part: ess(split(at_most(part, p))))


def mean_ess(draws: Tensor) -> Tensor:
    """Return the effective sample size for the mean, which must exist: (C, D) or (C, D, *event) -> (*event,).

    It is computed for half chains of the draws. Limits as for `bulk_ess`, and NaN where a draw is infinite.
    """
    return of_each("mean_ess", draws, lambda part: ess(split(part)))


def sd_ess(draws: Tensor) -> Tensor:
    """Return `mean_ess` of (x - mean)^2, for the standard deviation of draws (C, D) or (C, D, *event), as (*event,)."""
    return of_each("sd_ess", draws, lambda part: ess(split(squared_distance(part))))


def at_most(draws: Tensor, p: float) -> Tensor:
    """Return whether each draw is at most the p-quantile of all, as 0 and 1, (K, C, D)."""
    return (draws <= quantile(draws, p)[:, None, None]).to(draws.dtype)


def squared_distance(draws: Tensor) -> Tensor:
    """Return (x - mean over all chains)^2, (K, C, D)."""
    return (draws - draws.mean((-2, -1), keepdim=True)).square()


def ess(draws: Tensor) -> Tensor:
    """Return the effective sample size of the chains as they are, (K, C, D) -> (K,)."""
    chains, count = draws.shape[-2:]
    size = chains * count
    length = 1 << (2 * count - 1).bit_length()
    frequencies: Tensor = torch.fft.rfft(draws - draws.mean(-1, keepdim=True), n=length)
    power = frequencies.real.square() + frequencies.imag.square()
    autocovariance: Tensor = torch.fft.irfft(power, n=length)[..., :count] / count  # (K, C, D), by lag
    covariance = autocovariance.mean(-2)  # (K, D)
    within = covariance[:, :1] * count / (count - 1.0)
    total = covariance[:, :1] + draws.mean(-1).var(-1, keepdim=True)
    rho = 1.0 - (within - covariance) / total
    rho[:, 0] = torch.where(rho[:, 1].isnan(), math.nan, 1.0)
    pairs = 1 + max(0, (count - 3) // 2)  # as many as in ArviZ
    even = rho[:, : 2 * pairs : 2]
    sums = even + rho[:, 1 : 2 * pairs : 2]  # (K, pairs)
    good = (sums > 0).cumprod(-1)
    last = good.sum(-1).clamp(max=pairs - 1)[:, None]  # the first pair that is not positive, or the last of all
    before = torch.arange(pairs, device=draws.device) < last
    total_sum = sums.cummin(-1).values.masked_fill(~before, 0.0).sum(-1)
    after = even.gather(-1, last)[:, 0]
    after = torch.where((after > 0) | (sums.gather(-1, last)[:, 0] >= 0), after, 0.0)
    tau = (2.0 * total_sum + after - 1.0).clamp(min=1.0 / math.log10(size))
    result = (size / tau).masked_fill(rho[:, 1].isnan(), math.nan)
    flat = draws.flatten(1)
    return torch.where(flat.amax(-1) - flat.amin(-1) < _STILL, float(size), result)


def mcse_mean(draws: Tensor) -> Tensor:
    """Return the standard error of the mean of draws (C, D) or (C, D, *event), as (*event,): sd / sqrt(mean_ess).

    The mean and variance must exist. NaN for fewer than 4 draws and where a draw is not finite; 0 for equal draws.

    >>> from posterity.numerics import Key
    >>> print(f"{mcse_mean(Key(0).normal((4, 2500), torch.float64)):.3f}")
    0.010
    """
    return of_each("mcse_mean", draws, lambda part: part.flatten(1).std(-1) / ess(split(part)).sqrt())


def mcse_sd(draws: Tensor) -> Tensor:
    """Return the standard error of the standard deviation of draws (C, D) or (C, D, *event), as (*event,).

    With d = (x - mean)^2 and the delta method, sqrt(Var(d) / ESS(d) / mean(d)) / 2; no normality is assumed, four
    moments must exist. NaN for fewer than 4 draws, equal draws, and where a draw is not finite. (As in Stan's
    `posterior`, the ESS is computed for d; arviz-stats computes it for x.)
    """
    return of_each("mcse_sd", draws, _sd_error)


def mcse_quantile(draws: Tensor, p: float) -> Tensor:
    """Return the standard error of the p-quantile of draws (C, D) or (C, D, *event), as (*event,).

    **Math**: with S = quantile_ess(draws, p) the probability of the estimated quantile is Beta(S p + 1,
    S (1 - p) + 1); the error is half the distance of the order statistics at its 16 % and 84 % points.

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
    """Return the standard error of the median of draws, `mcse_quantile` at 1/2."""
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
    a, b = size * p + 1.0, size * (1.0 - p) + 1.0
    low, high = (count * beta_quantile(level, a, b) - 1.0 for level in _ONE_DEVIATION)
    ranks = torch.stack([low.clamp(min=0.0).floor(), high.clamp(max=count - 1.0).ceil()], -1).long()
    return ordered.gather(-1, ranks).diff(dim=-1)[:, 0] / 2.0
