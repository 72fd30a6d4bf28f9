"""Predictives of targets whose logarithm was modelled."""

import math
from collections.abc import Sequence
from typing import final

from torch import Tensor

from posterity.errors import BadData, positive, shown
from posterity.numerics.random import Key
from posterity.predictive.predictive import Predictive, aligned


@final
class ExponentialPredictive(Predictive):
    """The distribution of y = exp(shift + scale z), where `base` is the predictive of z.

    **Math**: log p(y) = log p_z((log y - shift) / scale) - log(y scale), for each entry. Quantiles are those of z,
    transformed. Where z ~ N(m, v) the mean is exp(shift + scale m + scale^2 v / 2); a mixture averages such means. With
    V and n the scaled variances of z due to weights and noise, aleatoric = E Var[y | w] = e^(2 a + 2 V + n) (e^n - 1)
    and epistemic = Var E[y | w] = e^(2 a + V + n) (e^V - 1), a = shift + scale m; for draws they are averages over the
    draws.

    **Limit**: `base` must be normal or an equal mixture of normals, each of which counts as a draw. Mean and variance
    grow as the exponential of a variance: where z is uncertain they are far above the median, `quantile(0.5)`.

    **Cost**: as `base`.

    **References**: Johnson, Kotz and Balakrishnan (1994), Continuous univariate distributions, chapter 14.

    **Example**:

    >>> import torch
    >>> from posterity.predictive import GaussianPredictive
    >>> base = GaussianPredictive(torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1))
    >>> pred = ExponentialPredictive(base)
    >>> round(pred.mean.item(), 4), pred.quantile(0.5).item()  # exp(1 / 2), exp(0)
    (1.6487, 1.0)
    """

    classifies = False

    def __init__(self, base: Predictive, shift: float = 0.0, scale: float = 1.0) -> None:
        """Take the predictive of z, and the shift and scale from z to the logarithm of the target."""
        positive("ExponentialPredictive.scale", scale)
        if base.normals is None:
            raise TypeError(f"ExponentialPredictive.base must be normal or a mixture of normals. Got {shown(base)}.")
        self.base, self.shift, self.scale = base, shift, scale

    @property
    def mean(self) -> Tensor:
        location, variance = self._normals()
        return (location + 0.5 * variance).exp().mean(0)

    @property
    def aleatoric(self) -> Tensor:
        location, variance = self._normals()
        if len(location) > 1:
            return ((2.0 * location + variance).exp() * variance.expm1()).mean(0)
        weights, noise = self._parts()
        return (2.0 * location[0] + 2.0 * weights + noise).exp() * noise.expm1()

    @property
    def epistemic(self) -> Tensor:
        location, variance = self._normals()
        if len(location) > 1:
            means = (location + 0.5 * variance).exp()
            return (means - means.mean(0)).square().mean(0)
        weights, noise = self._parts()
        return (2.0 * location[0] + weights + noise).exp() * weights.expm1()

    def check(self, y: Tensor) -> Tensor:
        targets = aligned(y, self.base.mean)
        if bool((targets <= 0).any()):
            raise BadData(f"y must be above 0, as its logarithm is predicted. Got {float(targets[targets <= 0][0]):g}.")
        return targets

    def log_prob(self, y: Tensor) -> Tensor:
        z, slope = self._inner(y)
        return self.base.log_prob(z) - slope

    def expected_log_prob(self, y: Tensor) -> Tensor:
        z, slope = self._inner(y)
        return self.base.expected_log_prob(z) - slope

    def joint_log_prob(self, y: Tensor) -> Tensor:
        z, slope = self._inner(y)
        return self.base.joint_log_prob(z) - slope.sum()

    def sample(self, draws: int, key: Key | None = None) -> Tensor:
        return self._outer(self.base.sample(draws, key))

    def quantile(self, p: float) -> Tensor:
        return self._outer(self.base.quantile(p))

    def rows(self, index: Tensor | slice) -> "ExponentialPredictive":
        return ExponentialPredictive(self.base.rows(index), self.shift, self.scale)

    def _joined(self, parts: Sequence["ExponentialPredictive"]) -> "ExponentialPredictive":
        if any((part.shift, part.scale) != (self.shift, self.scale) for part in parts):
            raise ValueError("Predictive.concatenate: all parts must have the same shift and scale. Got several.")
        return ExponentialPredictive(Predictive.concatenate([part.base for part in parts]), self.shift, self.scale)

    def _outer(self, z: Tensor) -> Tensor:
        return (self.shift + self.scale * z.double()).exp()

    def _inner(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return z, and log |dy / dz| of each row, (N,)."""
        logs = self.check(y).double().log()
        slope = (logs + math.log(self.scale)).nan_to_num(0.0).flatten(1).sum(1)
        return (logs - self.shift) / self.scale, slope

    def _normals(self) -> tuple[Tensor, Tensor]:
        """Means and variances (S, N, *event) of the logarithm, in float64."""
        normals = self.base.normals
        assert normals is not None
        means, scales = (value.double() for value in normals)
        return self.shift + self.scale * means, (self.scale * scales).square()

    def _parts(self) -> tuple[Tensor, Tensor]:
        """Variances of the logarithm due to the weights and to the noise."""
        square = self.scale**2
        return square * self.base.epistemic.double(), square * self.base.aleatoric.double()
