"""What turns Gaussian network outputs into a predictive distribution of targets."""

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from posterity.errors import NotPositiveDefinite
from posterity.likelihoods.likelihood import Likelihood
from posterity.numerics.random import Key
from posterity.predictive.predictive import Predictive


class Integrator(ABC):
    """A way to do the integral p(y) = E p(y | f) over outputs f ~ N(mean, covariance); an immutable value."""

    @abstractmethod
    def __call__(self, likelihood: Likelihood, mean: Tensor, covariance: Tensor, key: Key) -> Predictive:
        """The predictive at outputs of mean (N, *event) and covariance (N, D, D), D the flattened event.

        Where `marginal` says so, variances (N, D) will do. `key` is the source of randomness, where there is any.
        """

    def marginal(self, likelihood: Likelihood, mean: Tensor) -> bool:
        """Whether variances (N, D) of the outputs are all that is used at outputs shaped as `mean`."""
        return False


def output_variance(mean: Tensor, covariance: Tensor) -> Tensor:
    """Variance of each output, shaped as mean (N, *event), of a covariance (N, D, D) or variances (N, D); checked."""
    count, size = mean.shape[0], math.prod(mean.shape[1:])
    if covariance.shape not in ((count, size, size), (count, size)):
        raise ValueError(
            f"covariance must be one matrix for each row of the outputs, {(count, size, size)}. "
            f"Got {tuple(covariance.shape)}. Give variances of independent outputs as {(count, size)}."
        )
    variance = covariance if covariance.dim() == 2 else covariance.diagonal(dim1=-2, dim2=-1)  # (N, D)
    slack = rounding(variance.dtype) * variance.abs().amax(-1, keepdim=True)
    if not bool(torch.isfinite(covariance).all() & (variance >= -slack).all()):
        raise NotPositiveDefinite(
            "covariance must be finite, with no variance below 0. "
            f"Got {float(variance.detach().min()):.3g} as the smallest variance. Compute the posterior in float64."
        )
    return variance.clamp_min(0.0).reshape(mean.shape)


def rounding(dtype: torch.dtype) -> float:
    """The relative error below which a negative variance or eigenvalue is taken for a rounded zero."""
    return float(torch.finfo(dtype).eps ** 0.5)


def each_label(mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
    """Mean (R, C) and covariance (R, C, C) of the logits of each label alone, R = N times the number of positions."""
    count, classes = mean.shape[:2]
    if mean.dim() == 2:
        return mean, covariance
    places = math.prod(mean.shape[2:])
    blocks = covariance.reshape(count, classes, places, classes, places)  # (N, C, P, C, P)
    own = blocks.diagonal(dim1=2, dim2=4).movedim(-1, 1)  # (N, P, C, C)
    return mean.movedim(1, -1).reshape(-1, classes), own.reshape(-1, classes, classes)


def at_positions(probs: Tensor, mean: Tensor) -> Tensor:
    """Probabilities (R, C) of each label in the places of the logits, (N, C, *positions)."""
    if mean.dim() == 2:
        return probs
    return probs.reshape(len(mean), *mean.shape[2:], -1).movedim(-1, 1)
