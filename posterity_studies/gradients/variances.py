"""Variances of estimates, with standard errors of their own."""

import math
from dataclasses import dataclass

from torch import Tensor

ROUNDING = 1e-9  # variances below this are zero but for the rounding of numbers


@dataclass(frozen=True)
class Variance:
    """The variance of an estimator for one pass through the data, its standard error, and its exact value if known.

    An estimate from K passes has its variance multiplied by K, so that what costs the same is compared.
    """

    value: float
    error: float
    exact: float | None = None

    def __str__(self) -> str:
        """Value and error, or 0 where nothing but rounding is left."""
        return f"{self.value:.3g} ± {self.error:.1g}" if self.value > ROUNDING else "0"


def total_variance(estimates: Tensor, passes: int, exact: float | None = None) -> Variance:
    """The variances of independent estimates (S, R) summed over R, for one of `passes` passes.

    The squared distances from the mean are averaged, and the standard error is that of this average.

    >>> import torch
    >>> total_variance(torch.tensor([[0.0], [2.0], [4.0]]), passes=1).value
    4.0
    """
    count = len(estimates)
    distance = (estimates.double() - estimates.double().mean(0)).square().sum(1) * (count / (count - 1))
    error = float(distance.std()) / math.sqrt(count)
    return Variance(passes * float(distance.mean()), passes * error, exact)
