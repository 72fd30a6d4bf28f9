"""The Laplace prior: the Bayesian reading of an L1 penalty."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from posterity.numerics.random import Key
from posterity.optim.shrinkage import soft_threshold
from posterity.priors.independent import Independent, column
from posterity.priors.prior import ENTROPY_FORMULA, over, times
from posterity.special.functions import expected_absolute


@dataclass(frozen=True, eq=False)
class Laplace(Independent):
    """Independent weights with a density that falls exponentially on both sides of its mean.

    **Math**: p(w) = exp(-|w - mean| / scale) / (2 scale). `scale` is Laplace's parameter b, a number or (M,) with one
    for each member; the standard deviation is sqrt(2) b. `mean` is a number. For w ~ N(m, s^2) and mean 0,
    E|w| = s sqrt(2 / pi) exp(-m^2 / (2 s^2)) + m erf(m / (s sqrt(2))), so `cross_entropy` is in closed form.

    **Limit**: exact. The mode under it is L1-penalised maximum likelihood with penalty |w| / scale. Its second
    derivative is 0 wherever it exists, so `precision` is zero: a Laplace approximation sees no curvature from it.
    Weights are exactly at the mean of the mode that `MAP(proximal=True)` finds.

    **Cost**: one pass over theta for the value, one for the gradient.

    **References**: Williams (1995), Bayesian regularization and pruning using a Laplace prior; Tibshirani (1996),
    Regression shrinkage and selection via the lasso, section 5.

    **Example**:

    >>> prior = Laplace(scale=0.5)
    >>> prior.log_prob(torch.tensor([1.0]))
    tensor(-2.)
    >>> prior.value_and_grad(torch.tensor([1.0, -3.0]))[1]
    tensor([-2.,  2.])
    >>> prior.variance(torch.zeros(1))
    tensor([0.5000])
    """

    scale: float | Tensor = 1.0
    mean: float = 0.0

    degree = 1

    def centred(self) -> tuple["Laplace", float]:
        return replace(self, mean=0.0), self.mean

    @property
    def formula(self) -> str:
        return f"exp(-|w|{over(float(self.scale))}){over(2.0 * float(self.scale))}"

    @property
    def kl_formula(self) -> str:
        scale, size = float(self.scale), f"{2.0 * float(self.scale):.6g}"
        expected = "E|w| = sigma sqrt(2/pi) exp(-mu^2 / (2 sigma^2)) + mu erf(mu / (sigma sqrt(2)))"
        return f"{times(1.0 / scale)}E|w|{'' if size == '1' else f' + log({size})'} - {ENTROPY_FORMULA}, {expected}"

    @property
    def nonsmooth(self) -> bool:
        return True

    def smooth_value_and_grad(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        return self.log_prob(theta), torch.zeros_like(theta)

    def proximal(self, theta: Tensor, step: float | Tensor) -> Tensor:
        """Move theta towards the mean by at most step / scale."""
        return soft_threshold(theta, step / column(self, theta.shape, theta), self.mean)

    def standard_log_prob(self, x: Tensor) -> Tensor:
        return -x.abs() - math.log(2.0)

    def standard_precision(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)

    def standard_sample(self, shape: tuple[int, ...], key: Key, device: torch.device) -> Tensor:
        """Draw by inversion: -sign(u) log(1 - 2 |u|) for u uniform on (-1/2, 1/2)."""
        uniform = key.uniform(shape, torch.float64, device).clamp_min(2.0**-54) - 0.5
        return -uniform.sign() * torch.log1p(-2.0 * uniform.abs())

    @property
    def standard_variance(self) -> float:
        return 2.0

    def standard_cross_entropy(self, mean: Tensor, scale: Tensor) -> Tensor:
        return expected_absolute(mean, scale) + math.log(2.0)
