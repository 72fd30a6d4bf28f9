"""Monte Carlo standard errors: how far estimates from chains are from those of endless ones."""

import torch
from torch import Tensor

from posterity.diagnostics.chains import check_probability, of_each, split
from posterity.diagnostics.effective_sample_size import at_most, ess, squared_distance
from posterity.numerics.beta import beta_quantile

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
