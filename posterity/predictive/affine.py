"""Predictives of targets in units other than the model's."""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from posterity.errors import positive, shown
from posterity.likelihoods.likelihood import event_sum
from posterity.numerics.random import Key
from posterity.predictive.predictive import Predictive, aligned


@final
class AffinePredictive(Predictive):
    """The distribution of y = shift + scale z, where `base` is the predictive of z.

    **Math**: log p(y) = log p_z((y - shift) / scale) - sum over the event of log scale. Mean, quantiles and draws are
    those of z, transformed; variances are multiplied by scale^2. `shift` and `scale` > 0 are numbers, or one for each
    target, (T,).

    **Limit**: exact for every regression predictive. Results are float64.

    **Cost**: as `base`.

    **Example**:

    >>> from posterity.predictive import GaussianPredictive
    >>> base = GaussianPredictive(torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1))
    >>> pred = AffinePredictive(base, 20.0, 3.0)
    >>> pred.mean.item(), pred.std.item(), round(pred.quantile(0.975).item(), 2)
    (20.0, 3.0, 25.88)
    """

    classifies = False

    def __init__(self, base: Predictive, shift: float | Tensor = 0.0, scale: float | Tensor = 1.0) -> None:
        """Take the predictive of z, and the shift and scale from z to the target."""
        if base.classifies:
            raise TypeError(f"AffinePredictive.base must be a predictive of numbers. Got {shown(base)}.")
        positive("AffinePredictive.scale", scale)
        device, event = base.mean.device, base.mean.shape[1:]
        self.base = base
        self.shift, self.scale = (torch.as_tensor(v, dtype=torch.float64, device=device) for v in (shift, scale))
        for name, value in (("shift", self.shift), ("scale", self.scale)):
            if value.shape not in ((), event):
                raise ValueError(
                    f"AffinePredictive.{name} must be a number or have the shape {tuple(event)} of a target. "
                    f"Got {tuple(value.shape)}."
                )

    @property
    def mean(self) -> Tensor:
        return self._outer(self.base.mean)

    @property
    def variance(self) -> Tensor:
        return self.scale.square() * self.base.variance

    @property
    def std(self) -> Tensor:
        return self.scale * self.base.std  # finite where the variance overflows

    @property
    def aleatoric(self) -> Tensor:
        return self.scale.square() * self.base.aleatoric

    @property
    def epistemic(self) -> Tensor:
        return self.scale.square() * self.base.epistemic

    @property
    def normals(self) -> tuple[Tensor, Tensor] | None:
        if (known := self.base.normals) is None:
            return None
        means, scales = known
        return self._outer(means), self.scale * scales

    def check(self, y: Tensor) -> Tensor:
        targets = aligned(y, self.mean)
        self.base.check((targets - self.shift) / self.scale)
        return targets

    def log_prob(self, y: Tensor) -> Tensor:
        return self.base.log_prob(self._inner(y)) - self._slope(y)

    def expected_log_prob(self, y: Tensor) -> Tensor:
        return self.base.expected_log_prob(self._inner(y)) - self._slope(y)

    def joint_log_prob(self, y: Tensor) -> Tensor:
        return self.base.joint_log_prob(self._inner(y)) - self._slope(y).sum()

    def sample(self, draws: int, key: Key | None = None) -> Tensor:
        return self._outer(self.base.sample(draws, key))

    def quantile(self, p: float) -> Tensor:
        return self._outer(self.base.quantile(p))

    def rows(self, index: Tensor | slice) -> "AffinePredictive":
        return AffinePredictive(self.base.rows(index), self.shift, self.scale)

    def __len__(self) -> int:
        return len(self.base)

    def _joined(self, parts: Sequence["AffinePredictive"]) -> "AffinePredictive":
        if any(not (torch.equal(part.shift, self.shift) and torch.equal(part.scale, self.scale)) for part in parts):
            raise ValueError("Predictive.concatenate: all parts must have the same shift and scale. Got several.")
        return AffinePredictive(Predictive.concatenate([part.base for part in parts]), self.shift, self.scale)

    def _outer(self, z: Tensor) -> Tensor:
        return self.shift + self.scale * z

    def _inner(self, y: Tensor) -> Tensor:
        return (aligned(y, self.mean) - self.shift) / self.scale

    def _slope(self, y: Tensor) -> Tensor:
        """log |dy / dz| of each row, (N,): the sum of log scale over its targets that are not missing."""
        targets = aligned(y, self.mean)
        return event_sum(torch.where(targets.isnan(), 0.0, self.scale.log()), targets.dim() - 1)
