"""What every curvature of the negative log-likelihood can do."""

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from posterity.model.data import Batch
from posterity.model.density import Density
from posterity.model.inputs import Inputs
from posterity.model.joint import Joint
from posterity.model.network import Buffers
from posterity.numerics.autodiff import chunk_rows


class Curvature(ABC):
    """A symmetric matrix that stands for the Hessian of -log p(D | theta) over the random weights.

    Sums over the rows of a batch: untempered, unscaled, without the prior. theta is (P,): `over_members`
    maps either method over a member axis.
    """

    @abstractmethod
    def matrix(self, joint: Joint | Density, theta: Tensor, batch: Batch | None, buffers: Buffers | None) -> Tensor:
        """The dense matrix (R, R) in float64, for one theta (P,)."""

    @abstractmethod
    def diagonal(self, joint: Joint | Density, theta: Tensor, batch: Batch | None, buffers: Buffers | None) -> Tensor:
        """Its diagonal (R,) in float64, for one theta (P,)."""


def over_members(
    function: Callable[[Tensor, Batch | None, Buffers | None], Tensor],
    theta: Tensor,
    batch: Batch | None,
    buffers: Buffers | None,
) -> Tensor:
    """`function(theta, batch, buffers)` for one theta (P,), or for all members of (M, P) at once, stacked."""
    if theta.dim() == 1:
        return function(theta, batch, buffers)
    bytes_each = 8 * 3 * theta.shape[-1] ** 2
    together = min(theta.shape[0], chunk_rows(bytes_each))
    rows = None if batch is None else (batch.inputs, batch.targets, batch.weights)
    axes = (0, 0 if batch is not None and batch.per_member else None, None if buffers is None else 0)

    def one(weights: Tensor, rows: tuple[Inputs, Tensor, Tensor | None] | None, buffers: Buffers | None) -> Tensor:
        return function(weights, None if rows is None else Batch(*rows), buffers)

    result: Tensor = torch.func.vmap(one, in_dims=axes, chunk_size=together)(theta, rows, buffers)
    return result


def weights_function(joint: Joint, theta: Tensor) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """(rebuild, random): `rebuild(random)` is the whole weight vector with the random weights replaced."""
    index = joint.random_indices
    weights = theta[: joint.num_weights].detach()
    if index is None:
        return (lambda random: random), weights
    return (lambda random: weights.index_copy(0, index, random)), weights[index]
