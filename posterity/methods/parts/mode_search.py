"""The start of a variational fit at a mode: means by Levenberg-Marquardt steps, scales by the curvature there."""

import logging
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from posterity.curvature import GaussNewton, Hessian
from posterity.errors import PosterityError, positive_whole
from posterity.methods.parts.gaussian_at_mode import prior_precision
from posterity.methods.parts.gradients.estimator import shifted
from posterity.model import Batch, Buffers, Joint, Problem

logger = logging.getLogger("posterity")

_FIRST_DAMPING, _LEAST_DAMPING = 1.0, 1e-9
_RAISE, _LOWER = 8.0, 0.2  # factors of the damping after a step that is refused, and one that is taken
_FLOOR = 1e-12  # least curvature, relative to the largest


@dataclass(frozen=True)
class AtMode:
    """A start of q at a mode: the first `steps` steps of the run look for it, on all rows.

    **Math**: Levenberg-Marquardt steps w <- w + (H + damping diag H)^-1 grad of the tempered log density in the random
    weights, each taken only where the density rises, with H = lp (Gauss-Newton matrix) + pp (prior precision). For a
    `Density`, H is minus its Hessian with the absolute values of its eigenvalues. At the last step H gives the scales.

    **Limit**: q begins at the optimum of a linear model with Gaussian noise. Weights that are points and the
    likelihood's learnt parameters do not move in the search. Modules without a Gauss-Newton matrix begin where they
    are, which is logged.

    **Cost**: a dense matrix (R, R) for R random weights, and its solution, in each of these steps.

    **References**: Levenberg (1944); Marquardt (1963); Opper and Archambeau (2009), section 2.

    >>> AtMode(steps=20)
    AtMode(steps=20)
    """

    steps: int = 40

    def __post_init__(self) -> None:
        positive_whole("AtMode.steps", self.steps)


class SearchState(NamedTuple):
    """The damping of the search (...,), negative where it was given up, and the moments of the optimiser after it."""

    damping: Tensor
    moments: Any


class Search(NamedTuple):
    """theta (..., T) after a step, the damping (...,), the log density (...,), and H (..., R, R) at theta."""

    theta: Tensor
    damping: Tensor
    value: Tensor
    curvature: Tensor | None


def first_damping(theta: Tensor) -> Tensor:
    """Return the damping (...,) before the first step, for theta (..., T)."""
    return torch.full(theta.shape[:-1], _FIRST_DAMPING, dtype=torch.float64, device=theta.device)


def search_step(joint: Problem, theta: Tensor, damping: Tensor, batch: Batch, buffers: Buffers, last: bool) -> Search:
    """Take one step of the search from theta (T,) or (M, T); H is computed at the new theta if it is the `last`.

    H is None where the search was given up.
    """
    if theta.dim() == 1:
        return _one_step(joint, theta, damping, batch, buffers, last)
    each = [
        _one_step(
            joint.member(i) if joint.num_members is not None else joint,
            theta[i],
            damping[i],
            batch.member(i) if batch is not None else batch,
            {name: buffer[i] for name, buffer in buffers.items()},
            last,
        )
        for i in range(len(theta))
    ]
    curvatures = [result.curvature for result in each]
    stacked = None if any(h is None for h in curvatures) else torch.stack([h for h in curvatures if h is not None])
    theta, damping, value = (torch.stack(parts) for parts in zip(*(result[:3] for result in each), strict=True))
    return Search(theta, damping, value, stacked)


def _one_step(joint: Problem, theta: Tensor, damping: Tensor, batch: Batch, buffers: Buffers, last: bool) -> Search:
    value, grad, _ = joint.value_and_grad(theta, batch, buffers, train=False)
    size = float(damping)
    if size < 0.0:
        return Search(theta, damping, value, None)
    try:
        curvature = _curvature(joint, theta, batch, buffers)
    except (PosterityError, ValueError, TypeError, NotImplementedError, RuntimeError) as error:
        logger.warning("The search for a mode was left out: %s", error)
        return Search(theta, -torch.ones_like(damping), value, None)
    indices = joint.random_indices
    slope = (grad[: joint.num_random] if indices is None else grad[indices]).double()
    damped = curvature + torch.diag(size * curvature.diagonal())
    root, failed = torch.linalg.cholesky_ex(damped)
    move = torch.cholesky_solve(slope.unsqueeze(-1), root).squeeze(-1)
    reached = shifted(theta, move.to(theta.dtype), indices)
    after = joint.value_and_grad(reached, batch, buffers, train=False)[0]
    if not bool(failed) and bool(after >= value):
        theta, value, size = reached, after, max(size * _LOWER, _LEAST_DAMPING)
        curvature = _curvature(joint, theta, batch, buffers) if last else curvature
    else:
        size *= _RAISE
    return Search(theta, torch.full_like(damping, size), value, curvature)


def _curvature(joint: Problem, theta: Tensor, batch: Batch, buffers: Buffers) -> Tensor:
    """H (R, R) in float64 at theta (T,), positive definite."""
    if not isinstance(joint, Joint):
        values, vectors = torch.linalg.eigh(Hessian().matrix(joint, theta, None, None))
        values = values.abs()
        values = values.clamp_min(_FLOOR * float(values.max()) + torch.finfo(torch.float64).tiny)
        total: Tensor = (vectors * values) @ vectors.T
        return total
    likelihood_power, prior_power = joint.powers
    fitted, weights = joint.fitted(theta), theta[: joint.num_weights]
    data = GaussNewton().matrix(fitted, weights, batch, buffers) * (likelihood_power * (joint.num_data / batch.size))
    total = data + torch.diag(prior_power * prior_precision(fitted, theta).clamp_min(0.0))
    diagonal = total.diagonal()
    diagonal.add_(_FLOOR * float(diagonal.max()) + torch.finfo(torch.float64).tiny)
    return total
