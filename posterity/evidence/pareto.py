"""Pareto smoothing: the largest importance weights made what their distribution expects them to be."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from posterity.numerics.generalized_pareto import GeneralizedPareto

EQUAL = 1e-10  # relative differences of weights below which rounding makes them


class Smoothed(NamedTuple):
    """Log weights (S,), the largest of them smoothed, and k-hat."""

    log_weights: Tensor
    pareto_k: float


def pareto_smoothed(log_weights: Tensor, efficiency: float = 1.0) -> Smoothed:
    """Log weights with the M = min(S / 5, 3 sqrt(S / r)) largest replaced by quantiles of a fitted tail, and its shape.

    A generalised Pareto distribution is fitted to the excesses of the M largest weights over the next one (Vehtari et
    al., 2024, Pareto smoothed importance sampling); its shape is k-hat, drawn to 1/2 with the weight of ten draws as
    there. Its quantiles at (z - 1/2) / M take the place of the z-th of them, none above the largest weight. Weights
    that are equal up to rounding have k-hat -inf and stay as they are; so do those of which nearly all vanish beside
    the largest, whose k-hat is inf. `efficiency` r is that of draws of a chain: effective ones over all.

    >>> pareto_smoothed(torch.zeros(100)).pareto_k
    -inf
    """
    logs = log_weights.to(torch.float64)
    count, top = len(logs), logs.max()
    tail = math.ceil(min(count / 5, 3.0 * math.sqrt(count / efficiency)))
    order = logs.argsort()
    largest = order[-tail:]
    weights = (logs - top).exp()  # the largest is 1
    threshold = weights[order[-tail - 1]]
    excesses = weights[largest] - threshold
    if float(1.0 - threshold) <= EQUAL:
        return Smoothed(logs, -math.inf)
    excesses = excesses.clamp_min(torch.finfo(torch.float64).tiny)  # ties with the threshold
    fitted = GeneralizedPareto.fit(excesses)
    if not math.isfinite(fitted.shape) or not math.isfinite(fitted.scale):
        return Smoothed(logs, math.inf)
    shape = (tail * fitted.shape + 10 * 0.5) / (tail + 10)
    middles = (torch.arange(1, tail + 1, dtype=torch.float64, device=logs.device) - 0.5) / tail
    expected = threshold + GeneralizedPareto(shape, fitted.scale).quantile(middles)
    return Smoothed(logs.index_copy(0, largest, expected.log().clamp_max(0.0) + top), shape)
