"""The logistic prior: as the normal near zero, as the Laplace far away."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from posterity.numerics.random import Key
from posterity.priors.independent import Independent


@dataclass(frozen=True, eq=False)
class Logistic(Independent):
    """Independent weights with a smooth peak and exponential tails.

    **Math**: p(w) = exp(-w / scale) / (scale (1 + exp(-w / scale))^2). `scale` is a number or (M,) with one for each
    member; the variance is pi^2 scale^2 / 3.

    **Limit**: the density is exact; `cross_entropy` is by quadrature, to 1e-10. Log-concave, so that `precision` is
    positive; a smooth stand-in for `Laplace(scale)`.

    **Cost**: one pass over theta; `cross_entropy` evaluates the density 201 times for each weight, and its gradient
    as often again.

    **References**: Johnson, Kotz and Balakrishnan (1995), Continuous Univariate Distributions 2, chapter 23.

    **Example**:

    >>> prior = Logistic(scale=0.5)
    >>> prior.log_prob(torch.zeros(1))
    tensor(-0.6931)
    >>> prior.variance(torch.zeros(1))
    tensor([0.8225])
    """

    scale: float | Tensor = 1.0

    def standard_log_prob(self, x: Tensor) -> Tensor:
        """log sigmoid(x) + log sigmoid(-x)."""
        return F.logsigmoid(x) + F.logsigmoid(-x)

    def standard_precision(self, x: Tensor) -> Tensor:
        """2 sigmoid(x) sigmoid(-x)."""
        return 2.0 * torch.sigmoid(x) * torch.sigmoid(-x)

    def standard_sample(self, shape: tuple[int, ...], key: Key, device: torch.device) -> Tensor:
        """By inversion: log(u / (1 - u))."""
        return torch.logit(key.uniform(shape, torch.float64, device).clamp_min(2.0**-54))

    @property
    def standard_variance(self) -> float:
        """pi^2 / 3."""
        return math.pi**2 / 3.0

    @property
    def standard_width(self) -> float:
        """1."""
        return 1.0
