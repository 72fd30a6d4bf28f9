"""Continuous ranked probability score."""

import math

import torch
from torch import Tensor

from posterity.metrics.scored import mean_over_rows, per_row, regression, scored, whole_number
from posterity.numerics.random import Key
from posterity.predictive.predictive import Predictive

_PAIRS = 1_000_000  # of mixture components at a time: bounds the memory


@mean_over_rows
def crps(pred: Predictive, y: Tensor, draws: int = 1000, seed: int = 0) -> Tensor:
    """Mean, over rows and outputs, of the continuous ranked probability score, in the units of y; lower is better.

    **Math**: integral of (F(x) - 1[x >= y])^2 dx with F the predictive distribution function of the output,
    = E|X - y| - E|X - X'| / 2 for independent X, X' ~ F. In closed form where the predictive is Gaussian or an equal
    mixture of S normals. Otherwise from `draws` samples x_i, fair (unbiased): the mean of |x_i - y| less half the mean
    of |x_i - x_j| over pairs i != j.

    **Limit**: each output is scored by its marginal alone. By samples it has noise, and may fall below 0.

    **Cost**: O(S^2 N D) for a mixture of S normals; O(draws N D) by samples.

    **References**: Gneiting and Raftery (2007), Strictly proper scoring rules, section 4.2; Grimit et al. (2006), for
    mixtures; Ferro (2014), Fair scores for ensemble forecasts.

    >>> from posterity.predictive.gaussian import GaussianPredictive
    >>> pred = GaussianPredictive(torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1))
    >>> round(crps(pred, torch.tensor([0.0])), 4)  # (sqrt 2 - 1) / sqrt(pi)
    0.2337
    """
    regression("crps", pred, "brier_score")
    whole_number("crps: draws", draws, least=2)
    targets = scored("crps", pred, y).double().reshape(-1)  # (R,)
    if pred.normals is None:
        sample = pred.sample(draws, Key(seed)).double().reshape(draws, -1)  # (draws, R)
        return per_row(_of_samples(sample, targets), pred)
    means, scales = (value.double().reshape(len(value), -1) for value in pred.normals)  # (S, R)
    together = max(1, _PAIRS // len(means) ** 2)
    parts = [
        _of_normals(means[:, low : low + together], scales[:, low : low + together], targets[low : low + together])
        for low in range(0, len(targets), together)
    ]
    return per_row(torch.cat(parts), pred)


def _of_samples(sample: Tensor, targets: Tensor) -> Tensor:
    count = len(sample)
    # In order, the sum of x_j - x_i over pairs i < j has x_i with the weight 2 i - (count - 1).
    weight = 2.0 * torch.arange(count, dtype=sample.dtype, device=sample.device) - (count - 1)
    pairs = weight @ sample.sort(0).values  # (R,)
    return (sample - targets).abs().mean(0) - pairs / (count * (count - 1))


def _of_normals(means: Tensor, scales: Tensor, targets: Tensor) -> Tensor:
    """CRPS (R,) of the equal mixture of normals (S, R)."""
    away = _absolute(targets - means, scales).mean(0)
    apart = _absolute(means - means.unsqueeze(1), torch.hypot(scales, scales.unsqueeze(1))).mean((0, 1))
    return away - 0.5 * apart


def _absolute(mean: Tensor, scale: Tensor) -> Tensor:
    """E|X| for X ~ N(mean, scale^2)."""
    standard = mean / scale.clamp_min(torch.finfo(scale.dtype).tiny)
    density = torch.exp(-0.5 * standard.square()) * math.sqrt(2.0 / math.pi)
    return mean * torch.erf(standard / math.sqrt(2.0)) + scale * density
