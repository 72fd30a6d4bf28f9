"""The scale mixture of normals: a spike and a slab."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from posterity.errors import positive, shown
from posterity.numerics.random import Key
from posterity.priors.independent import Independent

_HALF_LOG_TWO_PI = 0.5 * math.log(2.0 * math.pi)


@dataclass(frozen=True, eq=False)
class ScaleMixture(Independent):
    """Independent weights, each from one of several normals around zero.

    **Math**: p(w) = sum over c of weights[c] N(w; 0, (scale scales[c])^2). `weights` are positive and sum to 1. `scale`
    is common to all components, a number or (M,) with one for each member. The variance is
    scale^2 sum over c of weights[c] scales[c]^2.

    **Limit**: the density is exact; `cross_entropy` is by quadrature, to 1e-8 while scales differ by less than 1e5.
    A point mass has infinite cross-entropy with a normal: use a narrow normal for a spike. Not log-concave:
    `precision` may be negative between the components' widths.

    **Cost**: one pass over theta for each component; `cross_entropy` evaluates the density 401 times for each weight,
    and its gradient as often again.

    **References**: Blundell et al. (2015), Weight uncertainty in neural networks, eq. 7.

    **Example**:

    >>> prior = ScaleMixture(weights=(0.5, 0.5), scales=(1.0, 0.05))
    >>> prior.log_prob(torch.tensor([0.0]))
    tensor(1.4324)
    >>> prior.variance(torch.zeros(1))
    tensor([0.5013])
    """

    weights: tuple[float, ...]
    scales: tuple[float, ...]
    scale: float | Tensor = 1.0

    quadrature_points = 401

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("weights", "scales"):
            values = getattr(self, name)
            if not isinstance(values, (tuple, list)) or not values:
                raise ValueError(f"ScaleMixture.{name} must be a tuple, one for each component. Got {shown(values)}.")
            for index, value in enumerate(values):
                positive(f"ScaleMixture.{name}[{index}]", value)
            object.__setattr__(self, name, tuple(values))
        if len(self.weights) != len(self.scales):
            raise ValueError(
                "ScaleMixture: weights and scales must have one entry for each component. "
                f"Got {len(self.weights)} weights and {len(self.scales)} scales."
            )
        if abs(sum(self.weights) - 1.0) > 1e-9:
            raise ValueError(
                f"ScaleMixture.weights must sum to 1. Got {shown(self.weights)}, which sum to {sum(self.weights):g}. "
                "Divide each by their sum."
            )

    def standard_log_prob(self, x: Tensor) -> Tensor:
        """log of the sum over c of weights[c] N(x; 0, scales[c]^2)."""
        return torch.logsumexp(self._components(x), dim=0)

    def standard_precision(self, x: Tensor) -> Tensor:
        """E[1 / s^2] - x^2 Var[1 / s^2] over the components, given x."""
        shares = torch.softmax(self._components(x), dim=0)  # (components, ...)
        precisions = [scale**-2 for scale in self.scales]
        mean = sum((share * value for share, value in zip(shares, precisions, strict=True)), torch.zeros_like(x))
        spread = sum(
            (share * (value - mean).square() for share, value in zip(shares, precisions, strict=True)),
            torch.zeros_like(x),
        )
        return mean - x.square() * spread

    def standard_sample(self, shape: tuple[int, ...], key: Key, device: torch.device) -> Tensor:
        weights = torch.tensor(self.weights, dtype=torch.float64, device=device)
        uniform = key.fold("component").uniform(shape, torch.float64, device)
        component = torch.bucketize(uniform, weights.cumsum(0)[:-1], right=True)
        scales = torch.tensor(self.scales, dtype=torch.float64, device=device)
        return scales[component] * key.fold("normal").normal(shape, torch.float64, device)

    @property
    def standard_variance(self) -> float:
        return sum(weight * scale**2 for weight, scale in zip(self.weights, self.scales, strict=True))

    @property
    def standard_width(self) -> float:
        return min(self.scales)

    def _components(self, x: Tensor) -> Tensor:
        """log(weights[c] N(x; 0, scales[c]^2)), (components, ...)."""
        return torch.stack(
            [
                (math.log(weight) - math.log(scale) - _HALF_LOG_TWO_PI) - 0.5 * (x / scale).square()
                for weight, scale in zip(self.weights, self.scales, strict=True)
            ]
        )
