"""Models that are linear in their random weights: origin, prior, and the check that they are linear."""

import torch
from torch import Tensor

from posterity.model import Batch, Buffers, Joint
from posterity.numerics.random import Key
from posterity.precisions.dense import Dense
from posterity.priors import Correlated, Normal


def at_zero(joint: Joint, theta: Tensor) -> Tensor:
    """Return theta (P,) with every random weight at 0."""
    index = joint.random_indices
    return torch.zeros_like(theta) if index is None else theta.index_fill(0, index, 0.0)


def placed(origin: Tensor, index: Tensor | None, values: Tensor) -> Tensor:
    """Return theta with these values of the random weights."""
    return values if index is None else origin.index_copy(0, index, values)


def precision_root(joint: Joint, origin: Tensor) -> tuple[Tensor, Tensor]:
    """Return a root (R, R) of the prior precision of the random weights, and their mean (R,) given the others."""
    prior, index = joint.bound_prior, joint.random_indices
    slope = prior.value_and_grad(origin)[1]  # Lambda0 m0 where all weights are random, at 0
    if isinstance(prior, Normal):
        precision = prior.precision(origin)
        slope, precision = (slope, precision) if index is None else (slope[index], precision[index])
        return torch.diag(precision.sqrt()), slope / precision
    assert isinstance(prior, Correlated)
    matrix = prior.matrix
    if index is None and isinstance(matrix, Dense):
        return matrix.cholesky.mT.to(origin), prior.mean.to(origin)
    dense = matrix.matvec(torch.eye(matrix.size, dtype=torch.float64, device=origin.device)).to(origin)
    if index is None:
        return torch.linalg.cholesky(dense).mT, prior.mean.to(origin)
    factor = torch.linalg.cholesky(dense[index][:, index])
    return factor.mT, torch.cholesky_solve(slope[index].unsqueeze(-1), factor).squeeze(-1)


def is_linear(joint: Joint, theta: Tensor, rows: Batch, buffers: Buffers | None) -> bool:
    """Return whether the outputs of these rows are linear in the weights around theta, along one random direction."""
    step = 0.1 * Key(0).fold("linear").normal(tuple(theta.shape), torch.float32, theta.device).to(theta.dtype)
    up, middle, down = (joint.outputs(at, rows.inputs, buffers) for at in (theta + step, theta, theta - step))
    return float((up + down - 2.0 * middle).abs().max()) <= 1e-3 * float((up - down).abs().max())


def refuse_curved(method: str, joint: Joint, origin: Tensor, rows: Batch, jacobian: Tensor, outputs: Tensor) -> None:
    """Raise a ValueError if the outputs at a random theta differ from the linearisation at the origin."""
    direction = Key(0).normal((jacobian.shape[-1],), torch.float64, origin.device)
    index = joint.random_indices
    moved = direction.to(origin.dtype) if index is None else origin.index_copy(0, index, direction.to(origin.dtype))
    with torch.no_grad():
        there = joint.outputs(moved, rows.inputs).to(torch.float64)
    linear = outputs + (jacobian @ direction).reshape(outputs.shape)
    scale = float(there.abs().max()) + 1.0
    if not float((there - linear).abs().max()) <= 1e-3 * scale:
        raise ValueError(
            f"{method} needs a network that is linear in its weights, and this one is not. Use Laplace, or freeze all "
            "but the last layer with joint.with_weights('...')."
        )
