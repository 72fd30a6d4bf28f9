"""Gaussian observation noise, known or learnt."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from posterity.likelihoods.likelihood import event_sum
from posterity.likelihoods.scaled import HALF_LOG_TWO_PI, Scaled
from posterity.numerics.random import Key


@dataclass(frozen=True, eq=False)
class Gaussian(Scaled):
    """Independent normal noise around each network output.

    **Math**: y ~ N(f, scale^2), log p = sum over the event of -(y - f)^2 / (2 scale^2) - log scale - log(2 pi) / 2.
    Outputs and targets are (N,), (N, D) or any (N, *event), such as images. `scale` is one standard deviation for
    all outputs or one for each, (D,). With `learn=True` it is the starting value of a parameter whose raw form is
    log(scale), with 1 or D entries; members of a batched run each have their own, (M, 1, 1) or (M, 1, D) against
    outputs (M, N, D).

    `log_scale_prior = (mean, standard deviation)` puts a normal prior on each entry of log(scale). None is a flat
    prior on log(scale). It is improper: fine for a mode, a Laplace or a variational fit, but a sampler needs a
    proper one.

    **Limit**: exact for Gaussian noise; one outlier at distance d costs d^2 / (2 scale^2) nats. Hessian and Fisher
    information in f are equal and constant.

    **Cost**: one pass over the outputs.

    **References**: Bishop (2006), Pattern Recognition and Machine Learning, eq. 5.12.

    **Example**:

    >>> likelihood = Gaussian(scale=2.0)
    >>> likelihood.log_prob(torch.tensor([[1.0]]), torch.tensor([[3.0]]))
    tensor([-2.1121])
    >>> Gaussian(scale=0.5, learn=True).free(torch.zeros(1))
    tensor([-0.6931])
    """

    scale: float | tuple[float, ...] | Tensor = 1.0
    learn: bool = False
    log_scale_prior: tuple[float, float] | None = None

    link = "identity"
    normal_targets = True

    @property
    def _unit_fisher(self) -> float:
        return 1.0

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """log N(y; f, scale^2) for each row, (..., N, *event) and (N, *event) -> (..., N)."""
        scale = self._aligned(outputs)
        log_scale = scale.log() if isinstance(scale, Tensor) else math.log(scale)
        entries = -0.5 * ((targets - outputs) / scale).square() - (log_scale + HALF_LOG_TWO_PI)
        return event_sum(entries, targets.dim() - 1)

    def expected_log_prob(self, mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
        """log p(y | mean) - sum over the event of variance / (2 scale^2)."""
        noise = self.variance(mean).flatten(1)
        return self.log_prob(mean, targets) - 0.5 * (variance.reshape(noise.shape) / noise).sum(1)

    def sample(self, outputs: Tensor, key: Key) -> Tensor:
        return outputs + self._aligned(outputs) * key.normal(outputs.shape, outputs.dtype, outputs.device)

    def variance(self, outputs: Tensor) -> Tensor:
        return torch.zeros_like(outputs) + self._aligned(outputs) ** 2

    def output_hessian(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.output_fisher(outputs, targets.dim() - 1)

    def cdf(self, outputs: Tensor, targets: Tensor) -> Tensor:
        value: Tensor = torch.special.ndtr((targets - outputs) / self._aligned(outputs))
        return value
