"""Dropout training as variational inference: noise and prior implied by its loss, and its KL divergence."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from posterity.errors import positive, positive_whole, shown
from posterity.special.functions import binary_entropy

_POINTS = 4001  # of the trapezoid rule: exact to rounding for smooth integrands
_TAIL = 9.0  # standard deviations beyond which the mass is below rounding
_APART = 40.0  # distance at which the overlap of two unit normals underflows float64


@dataclass(frozen=True)
class DropoutObjective:
    """The conventions of a dropout loss (mean data loss + penalty) that fix the noise precision tau it implies.

    **Math**: (1/n) sum |y - f|^2 / 2 + lambda |W|^2 is -ELBO / (n tau) up to a constant if KL = (1 - p) l^2 / 2 |M|^2,
    with the prior N(0, l^-2) on M, the weights under unscaled masks. Hence tau = (1 - p) l^2 / (2 n lambda)
    for lambda on M. Without `halved` the loss is |y - f|^2, which doubles tau; with `weight_decay` the penalty is
    lambda / 2 |W|^2, which doubles it again; a loss averaged over `outputs` entries, as in `MSELoss`, divides it by
    their number. With `scaled_masks`, as in torch, W = (1 - p) M and lambda is on W: 1 - p becomes 1 / (1 - p).

    **Limit**: for weights far from zero compared with the width of the relaxed q: see `dropout_divergence`.

    **Cost**: none.

    **References**: Gal and Ghahramani (2016), Dropout as a Bayesian approximation, eq. 7 and appendix 4.2.

    **Example**:

    >>> DropoutObjective(scaled_masks=False).precision(0.0005, rate=0.5, length_scale=1.0, num_data=1000)
    0.5
    """

    halved: bool = True
    weight_decay: bool = False
    outputs: int = 1
    scaled_masks: bool = True

    def __post_init__(self) -> None:
        positive_whole("DropoutObjective.outputs", self.outputs)

    def precision(self, penalty: float, *, rate: float, length_scale: float, num_data: int) -> float:
        """Noise precision tau under which this penalty matches the prior."""
        positive("DropoutObjective.precision: penalty", penalty)
        return self._product(rate, length_scale, num_data) / penalty

    def penalty(self, precision: float, *, rate: float, length_scale: float, num_data: int) -> float:
        """Penalty (lambda, or the weight decay) of the prior under noise of this precision."""
        positive("DropoutObjective.penalty: precision", precision)
        return self._product(rate, length_scale, num_data) / precision

    def length_scale(self, penalty: float, *, rate: float, precision: float, num_data: int) -> float:
        """Length scale l of the prior N(0, l^-2) that has this penalty under noise of this precision."""
        positive("DropoutObjective.length_scale: penalty", penalty)
        positive("DropoutObjective.length_scale: precision", precision)
        return math.sqrt(penalty * precision / self._product(rate, 1.0, num_data))

    def rate(self, penalty: float, *, precision: float, length_scale: float, num_data: int) -> float:
        """Dropout rate at which this penalty matches the prior; a ValueError where there is none."""
        positive("DropoutObjective.rate: penalty", penalty)
        positive("DropoutObjective.rate: precision", precision)
        ratio = penalty * precision / self._product(0.0, length_scale, num_data)
        kept = 1.0 / ratio if self.scaled_masks else ratio
        if kept > 1.0:
            side = "small" if self.scaled_masks else "large"
            raise ValueError(
                f"DropoutObjective.rate: the penalty is too {side} for any rate: without dropout it would be "
                f"{penalty / ratio:.6g}. Got {shown(penalty)}. Change the penalty, the length_scale or the precision."
            )
        return 1.0 - kept

    def _product(self, rate: float, length_scale: float, num_data: int) -> float:
        """Noise precision times penalty."""
        _check_rate("DropoutObjective", rate, zero=True)
        positive("DropoutObjective: length_scale", length_scale)
        positive_whole("DropoutObjective: num_data", num_data, "of rows")
        kept = 1.0 / (1.0 - rate) if self.scaled_masks else 1.0 - rate
        halves = (1 if self.halved else 2) * (2 if self.weight_decay else 1)
        return halves * kept * length_scale**2 / (2.0 * num_data * self.outputs)


def dropout_divergence(mean: Tensor, scale: float, rate: float, length_scale: float) -> Tensor:
    """KL((1-p) N(m, s^2 I) + p N(0, s^2 I) || N(0, l^-2 I)) for rows of weights m = `mean` (..., K), in nats, (...).

    A row is dropped as a whole. Exact to rounding, by an integral along m in float64; differentiable in the mean.

    >>> round(float(dropout_divergence(torch.tensor([1.0]), 0.05, rate=0.1, length_scale=1.0)), 6)
    2.621899
    """
    far = dropout_divergence_far(mean, scale, rate, length_scale)
    apart = torch.linalg.vector_norm(mean.double(), dim=-1, keepdim=True) / scale
    apart = apart.clamp_max(_APART)  # beyond, the overlap is zero and so is its slope
    steps = torch.linspace(0.0, 1.0, _POINTS, dtype=torch.float64, device=mean.device)
    nodes = -_TAIL + (apart.detach() + 2.0 * _TAIL) * steps  # (..., points), constant in the mean
    logit = math.log1p(-rate) - math.log(rate) + apart * (nodes - 0.5 * apart)
    at_zero, at_mean = (torch.exp(-0.5 * (nodes - centre).square()) for centre in (0.0, apart))
    density = (rate * at_zero + (1.0 - rate) * at_mean) / math.sqrt(2.0 * math.pi)
    # H(value) = H(component) + H(value | component) - H(component | value), the last by quadrature.
    return far + torch.trapezoid(density * binary_entropy(logit), nodes, dim=-1)


def dropout_divergence_far(mean: Tensor, scale: float, rate: float, length_scale: float) -> Tensor:
    """The limit of `dropout_divergence` for |m| >> s: (1-p) l^2 |m|^2 / 2 + K/2 (s^2 l^2 - log s^2 l^2 - 1) - H(p).

    It is the KL that training with dropout uses. Its constant diverges as s goes to 0.
    """
    _check_rate("dropout_divergence", rate, zero=False)
    positive("dropout_divergence: scale", scale)
    positive("dropout_divergence: length_scale", length_scale)
    if mean.dim() == 0:
        raise ValueError(f"dropout_divergence: mean must be rows of weights (..., K). Got {shown(mean)}.")
    width = (scale * length_scale) ** 2
    entropy = -rate * math.log(rate) - (1.0 - rate) * math.log1p(-rate)
    pull = 0.5 * (1.0 - rate) * length_scale**2 * mean.double().square().sum(-1)
    return pull + 0.5 * mean.shape[-1] * (width - math.log(width) - 1.0) - entropy


def _check_rate(name: str, rate: float, *, zero: bool) -> None:
    good = isinstance(rate, (int, float)) and not isinstance(rate, bool) and (rate >= 0 if zero else rate > 0)
    if not good or not rate < 1:
        raise ValueError(f"{name}: rate must be {'at least' if zero else 'above'} 0 and below 1. Got {shown(rate)}.")
