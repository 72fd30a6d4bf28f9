"""The Cauchy prior: tails so heavy that there is no mean."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from posterity.numerics.random import Key
from posterity.priors.independent import Independent


@dataclass(frozen=True, eq=False)
class Cauchy(Independent):
    """Independent weights most of which are small, and some of any size.

    **Math**: p(w) = 1 / (pi scale (1 + (w / scale)^2)). `scale` is half the interquartile range, a number or (M,) with
    one for each member.

    **Limit**: the density is exact; `cross_entropy` is by quadrature, to 1e-10. Neither mean nor variance exist
    (`variance` is nan), so no scale rule can match it. Not log-concave: `precision` is negative where |w| > scale.

    **Cost**: one pass over theta; `cross_entropy` evaluates the density 201 times for each weight, and its gradient
    as often again.

    **References**: Gelman et al. (2008), A weakly informative default prior distribution for logistic and other
    regression models.

    **Example**:

    >>> prior = Cauchy(scale=2.0)
    >>> prior.log_prob(torch.tensor([2.0]))
    tensor(-2.5310)
    >>> prior.variance(torch.zeros(1))
    tensor([nan])
    """

    scale: float | Tensor = 1.0

    def standard_log_prob(self, x: Tensor) -> Tensor:
        """-log(1 + x^2) - log pi."""
        return -torch.log1p(x.square()) - math.log(math.pi)

    def standard_precision(self, x: Tensor) -> Tensor:
        """2 (1 - x^2) / (1 + x^2)^2."""
        square = x.square()
        return 2.0 * (1.0 - square) / (1.0 + square).square()

    def standard_sample(self, shape: tuple[int, ...], key: Key, device: torch.device) -> Tensor:
        """By inversion: tan(pi (u - 1/2))."""
        return torch.tan(math.pi * (key.uniform(shape, torch.float64, device) - 0.5))

    @property
    def standard_variance(self) -> float:
        """Nan: there is none."""
        return math.nan

    @property
    def standard_width(self) -> float:
        """1."""
        return 1.0
