"""The KL condition of dropout: the divergence that training takes for granted, and where it is wrong."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from posterity.evidence import dropout_divergence, dropout_divergence_far

WIDTHS = (0.1, 0.05, 0.01, 0.001)  # s l, the width of the relaxed coins in units of the prior's
RATES = (0.5, 0.1)
FARTHEST = 14.0  # in units of s
POINTS = 281


@dataclass(frozen=True)
class Failure:
    """Below `distance` (|m| / s) the exact divergence falls with |m|, where the one of training rises.

    `within_a_percent` is the distance beyond which its slope is right to one per cent.
    """

    width: float
    rate: float
    distance: float
    within_a_percent: float


@dataclass(frozen=True, eq=False)
class Divergence:
    """Divergences of a row of one weight over |m| / s = `distance`, by width for the first of the rates; failures."""

    distance: Tensor
    exact: dict[float, Tensor]
    far: dict[float, Tensor]
    failures: list[Failure]


def divergence() -> Divergence:
    """Both divergences, and where the slopes part; nothing here is random."""
    distance = torch.linspace(0.0, FARTHEST, POINTS, dtype=torch.float64)
    exact, far = {}, {}
    for width in WIDTHS:
        mean = (distance * width).unsqueeze(1)
        exact[width] = dropout_divergence(mean, width, RATES[0], 1.0)
        far[width] = dropout_divergence_far(mean, width, RATES[0], 1.0)
    return Divergence(distance, exact, far, [_failure(width, rate) for rate in RATES for width in WIDTHS])


def _failure(width: float, rate: float) -> Failure:
    return Failure(
        width=width,
        rate=rate,
        distance=_first(lambda ratio: ratio > 0.0, width, rate),
        within_a_percent=_first(lambda ratio: ratio > 0.99, width, rate),
    )


def _first(good: Callable[[float], bool], width: float, rate: float) -> float:
    """The least distance from which on the exact slope over that of training is good, by bisection."""
    low, high = 2.0, 30.0
    for _ in range(20):
        middle = 0.5 * (low + high)
        low, high = (low, middle) if good(_ratio(middle, width, rate)) else (middle, high)
    return 0.5 * (low + high)


def _ratio(distance: float, width: float, rate: float) -> float:
    """Slope of the exact divergence in |m|, over the slope of the one that training takes for it."""
    slopes = []
    for function in (dropout_divergence, dropout_divergence_far):
        mean = torch.tensor([distance * width], dtype=torch.float64, requires_grad=True)
        slopes.append(float(torch.autograd.grad(function(mean, width, rate, 1.0), mean)[0]))
    return slopes[0] / slopes[1]
