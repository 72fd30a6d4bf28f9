"""The Student-t prior: normal weights, each with a variance of its own."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from posterity.errors import positive
from posterity.numerics.random import Key
from posterity.priors.independent import Independent


@dataclass(frozen=True, eq=False)
class StudentT(Independent):
    """Independent weights with polynomial tails, of any heaviness.

    **Math**: w = scale x with p0(x) = Gamma((d + 1) / 2) / (Gamma(d / 2) sqrt(pi d)) (1 + x^2 / d)^(-(d + 1) / 2),
    d = `degrees`. `scale` is a number or (M,) with one for each member. The variance is scale^2 d / (d - 2) for d > 2,
    infinite for 1 < d <= 2 and undefined (nan) below. x is normal with an inverse-gamma variance.

    **Limit**: the density is exact; `cross_entropy` is by quadrature, to 1e-10. Not log-concave: `precision` is
    negative where x^2 > d. `degrees` to infinity gives `Normal(scale)`, 1 gives `Cauchy(scale)`.

    **Cost**: one pass over theta; `cross_entropy` evaluates the density 201 times for each weight, and its gradient
    as often again.

    **References**: Gelman et al. (2013), Bayesian Data Analysis, section 17.2; Bailey (1994), Polar generation of
    random variates with the t-distribution, for `sample`.

    **Example**:

    >>> prior = StudentT(degrees=3.0, scale=0.5)
    >>> prior.log_prob(torch.zeros(1))
    tensor(-0.3077)
    >>> prior.variance(torch.zeros(1))
    tensor([0.7500])
    """

    degrees: float
    scale: float | Tensor = 1.0

    def __post_init__(self) -> None:
        positive("StudentT.degrees", self.degrees)
        super().__post_init__()

    def standard_log_prob(self, x: Tensor) -> Tensor:
        """log p0(x)."""
        half = 0.5 * (self.degrees + 1.0)
        constant = math.lgamma(half) - math.lgamma(0.5 * self.degrees) - 0.5 * math.log(math.pi * self.degrees)
        return constant - half * torch.log1p(x.square() / self.degrees)

    def standard_precision(self, x: Tensor) -> Tensor:
        """(d + 1) (d - x^2) / (d + x^2)^2."""
        square = x.square()
        return (self.degrees + 1.0) * (self.degrees - square) / (self.degrees + square).square()

    def standard_sample(self, shape: tuple[int, ...], key: Key, device: torch.device) -> Tensor:
        """sqrt(d (u^(-2 / d) - 1)) cos(2 pi v) for u, v uniform on (0, 1)."""
        first = key.fold("radius").uniform(shape, torch.float64, device).clamp_min(2.0**-54)
        second = key.fold("angle").uniform(shape, torch.float64, device)
        radius = (self.degrees * torch.expm1(-2.0 / self.degrees * first.log())).sqrt()
        return radius * torch.cos(2.0 * math.pi * second)

    @property
    def standard_variance(self) -> float:
        """d / (d - 2), inf up to d = 2 and nan up to d = 1."""
        if self.degrees <= 1.0:
            return math.nan
        return self.degrees / (self.degrees - 2.0) if self.degrees > 2.0 else math.inf

    @property
    def standard_width(self) -> float:
        """sqrt(d)."""
        return math.sqrt(self.degrees)
