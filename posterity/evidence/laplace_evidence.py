"""The evidence of a Gaussian approximation at a mode."""

import math

from torch import Tensor

from posterity.numerics.precision import Precision


def laplace_evidence(log_joint: Tensor, precision: Precision) -> Tensor:
    """log Z = log_joint + R/2 log 2 pi - 1/2 logdet: the Laplace approximation of the log normaliser.

    Takes the log density at the mode, all constants in, and the precision there; exact for linear-Gaussian models.
    Under tempering it is the log normaliser of the tempered density, not comparable across temperatures.

    >>> import torch
    >>> from posterity.numerics import Dense
    >>> peak = torch.tensor(-0.5 * math.log(2 * math.pi), dtype=torch.float64)  # of N(0, 1)
    >>> round(float(laplace_evidence(peak, Dense(torch.eye(1)))), 12)
    0.0
    """
    return log_joint + 0.5 * precision.size * math.log(2.0 * math.pi) - 0.5 * precision.logdet
