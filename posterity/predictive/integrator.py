"""Integrators from Gaussian network outputs to a predictive: the protocol, and Monte Carlo."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from posterity.errors import NotPositiveDefinite, shown
from posterity.likelihoods.likelihood import Likelihood
from posterity.numerics.random import Key
from posterity.predictive.draws import from_outputs
from posterity.predictive.predictive import Predictive


class Integrator(ABC):
    """A rule for the integral p(y) = E p(y | f) over outputs f ~ N(mean, covariance); an immutable value."""

    @abstractmethod
    def __call__(self, likelihood: Likelihood, mean: Tensor, covariance: Tensor, key: Key) -> Predictive:
        """Return the predictive at outputs of mean (N, *event) and covariance (N, D, D), D the flattened event.

        Variances (N, D) suffice where `marginal` returns True. `key` seeds the draws of a randomised rule.
        """

    def marginal(self, likelihood: Likelihood, mean: Tensor) -> bool:
        """Whether only variances (N, D) are used, at outputs shaped as `mean`."""
        return False


def output_variance(mean: Tensor, covariance: Tensor) -> Tensor:
    """Check a covariance (N, D, D) or variances (N, D); return each output's variance, shaped as mean (N, *event)."""
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
    """Relative size up to which a negative variance or eigenvalue counts as a rounded zero."""
    return float(torch.finfo(dtype).eps ** 0.5)


def each_label(mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean (R, C) and covariance (R, C, C) of the logits per label, R = N times the number of positions."""
    count, classes = mean.shape[:2]
    if mean.dim() == 2:
        return mean, covariance
    positions = math.prod(mean.shape[2:])
    blocks = covariance.reshape(count, classes, positions, classes, positions)  # (N, C, P, C, P)
    own = blocks.diagonal(dim1=2, dim2=4).movedim(-1, 1)  # (N, P, C, C)
    return mean.movedim(1, -1).reshape(-1, classes), own.reshape(-1, classes, classes)


def at_positions(probs: Tensor, mean: Tensor) -> Tensor:
    """Reshape probabilities (R, C) of each label to the shape of the logits, (N, C, *positions)."""
    return probs if mean.dim() == 2 else probs.reshape(len(mean), *mean.shape[2:], -1).movedim(-1, 1)


@dataclass(frozen=True)
class MonteCarlo(Integrator):
    """Average of the likelihood over drawn outputs, for any likelihood.

    **Math**: f_s ~ N(mean, covariance) for s = 1 .. `draws`, p(y) = (1/draws) sum_s p(y | f_s). Outputs of one row are
    drawn jointly, rows independently.

    **Limit**: unbiased; the standard error of a probability p is at most 1 / (2 sqrt(draws)). The draws are kept, so
    entropy splits into aleatoric and epistemic. Rows are drawn independently, so there is no `joint_log_prob`.

    **Cost**: O(N D^3 + draws N D^2) in float64; memory O(draws N D).

    **References**: Bishop (2006), chapter 11; Daxberger et al. (2021), Laplace redux.

    **Example**:

    >>> from posterity.likelihoods.bernoulli import Bernoulli
    >>> pred = MonteCarlo(draws=4000)(Bernoulli(), torch.tensor([[2.0]]), torch.tensor([[[4.0]]]), Key(0))
    >>> abs(float(pred.probs[0, 1]) - 0.7752) < 0.02
    True
    """

    draws: int = 1000

    def __post_init__(self) -> None:
        if isinstance(self.draws, bool) or not isinstance(self.draws, int) or self.draws < 1:
            raise ValueError(f"MonteCarlo.draws must be a positive integer. Got {shown(self.draws)}.")

    def __call__(self, likelihood: Likelihood, mean: Tensor, covariance: Tensor, key: Key) -> Predictive:
        output_variance(mean, covariance)  # raises where shape or diagonal is wrong
        noise = key.normal((self.draws, *covariance.shape[:2]), dtype=torch.float64, device=mean.device)  # (S, N, D)
        if covariance.dim() == 2:  # independent outputs
            deviation = covariance.double().clamp_min(0.0).sqrt() * noise
        else:
            deviation = torch.einsum("nij,snj->sni", square_root(covariance.double()), noise)
        outputs = mean.double() + deviation.reshape(self.draws, *mean.shape)
        return from_outputs(likelihood, outputs.to(mean.dtype), shared=False)


def square_root(covariance: Tensor) -> Tensor:
    """Return A with A A^T = covariance for each positive semi-definite (N, D, D), singular ones included.

    The Cholesky factor where it exists; else eigenvectors times roots of eigenvalues: slower, without jitter.
    """
    factor: Tensor
    factor, info = torch.linalg.cholesky_ex(covariance)
    singular = info > 0
    if not bool(singular.any()):
        return factor
    values, vectors = torch.linalg.eigh(covariance[singular])
    # Rounding in networks of float32 leaves eigenvalues below 0.
    if not bool((values >= -rounding(torch.float32) * values.abs().amax(-1, keepdim=True)).all()):
        raise NotPositiveDefinite(
            f"covariance must be positive semi-definite. Got an eigenvalue of {float(values.min()):.3g}. "
            "Compute the posterior in float64."
        )
    factor[singular] = vectors * values.clamp_min(0.0).sqrt().unsqueeze(-2)
    return factor
