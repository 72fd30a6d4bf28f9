"""The horseshoe prior: an infinite peak at zero and Cauchy-like tails."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from posterity.numerics.exponential_integral import scaled_exponential_integral
from posterity.numerics.quadrature import normal_expectation
from posterity.numerics.random import Key
from posterity.priors.independent import Independent


@dataclass(frozen=True, eq=False)
class Horseshoe(Independent):
    """Independent weights that are either near zero or hardly shrunk at all.

    **Math**: w ~ N(0, scale^2 l^2) with l ~ half-Cauchy(0, 1) for each weight, integrated over l:
    p(w) = (2 pi^3)^(-1/2) / scale * e^x E_1(x) with x = w^2 / (2 scale^2) and the exponential integral E_1. `scale` is
    the global scale, a number or (M,) with one for each member.

    **Limit**: the density is exact; `cross_entropy` is by quadrature, to 1e-7. The density is infinite at 0, as
    log(1 / |w|): `log_prob` is inf there, `precision` is negative everywhere, and there is no mode to find. Sample it
    or fit a distribution under it, from a start without zeros. Neither mean nor variance exist (`variance` is nan).

    **Cost**: some hundred operations for each weight; `cross_entropy` evaluates the density 401 times for each weight,
    and its gradient as often again.

    **References**: Carvalho, Polson and Scott (2010), The horseshoe estimator for sparse signals, theorem 1.

    **Example**:

    >>> prior = Horseshoe(scale=0.1)
    >>> prior.log_prob(torch.tensor([0.001, 1.0]))
    tensor(-1.2207)
    """

    scale: float | Tensor = 1.0

    def standard_log_prob(self, x: Tensor) -> Tensor:
        """log(e^y E_1(y)) - log(2 pi^3) / 2 with y = x^2 / 2."""
        return scaled_exponential_integral(0.5 * x.square()).log() - 0.5 * math.log(2.0 * math.pi**3)

    def standard_precision(self, x: Tensor) -> Tensor:
        """With G_n(y) = e^y E_n(y), y = x^2 / 2 and R = G_2 / G_1 it is 2 G_2' / G_1 + (4 R^2 - 2 R) / x^2."""
        half = 0.5 * x.square()
        first, second, third = (scaled_exponential_integral(half, order) for order in (1, 2, 3))
        slope = torch.where(half < 1.0, second - first, (second - 2.0 * third) / half)  # G_2' in its stable forms
        ratio = second / first
        return 2.0 * slope / first + (2.0 * ratio - 1.0) * ratio / half

    def standard_sample(self, shape: tuple[int, ...], key: Key, device: torch.device) -> Tensor:
        """A half-Cauchy scale for each weight, then its normal."""
        scale = torch.tan(0.5 * math.pi * key.fold("scale").uniform(shape, torch.float64, device))
        return scale * key.fold("normal").normal(shape, torch.float64, device)

    @property
    def standard_variance(self) -> float:
        """Nan: there is none."""
        return math.nan

    @property
    def standard_width(self) -> float:
        """0: there is a singularity at zero."""
        return 0.0

    def standard_cross_entropy(self, mean: Tensor, scale: Tensor) -> Tensor:
        """-E log p0(x) by quadrature; a node that lies on the singularity is moved off it."""
        return normal_expectation(
            lambda x: -self.standard_log_prob(x.abs().clamp_min(1e-150)), mean, scale, points=401, width=0.0
        )
