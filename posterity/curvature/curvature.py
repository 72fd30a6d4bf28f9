"""What every curvature of the negative log-likelihood can do."""

import logging
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor

from posterity.likelihoods.likelihood import Likelihood
from posterity.model.data import Batch
from posterity.model.density import Density
from posterity.model.inputs import Inputs, map_inputs
from posterity.model.joint import Joint
from posterity.model.network import Buffers, Network
from posterity.numerics.autodiff import chunk_rows

logger = logging.getLogger("posterity")

VMAP_REFUSALS = (RuntimeError, NotImplementedError, ValueError)
MemberFunction = Callable[[Joint | Density, Tensor, Batch | None, Buffers | None], Tensor]


class Curvature(ABC):
    """A symmetric matrix that stands for the Hessian of -log p(D | theta) over the random weights.

    Sums over the rows of a batch: untempered, unscaled, without the prior. theta is (P,): `over_members`
    maps either method over a member axis, and over chunks of rows that fit the memory budget.
    """

    forms_matrix: ClassVar[bool] = False
    """Whether `diagonal` forms the whole matrix on its way."""

    @abstractmethod
    def matrix(self, joint: Joint | Density, theta: Tensor, batch: Batch | None, buffers: Buffers | None) -> Tensor:
        """The dense matrix (R, R) in float64, for one theta (P,)."""

    @abstractmethod
    def diagonal(self, joint: Joint | Density, theta: Tensor, batch: Batch | None, buffers: Buffers | None) -> Tensor:
        """Its diagonal (R,) in float64, for one theta (P,)."""

    @abstractmethod
    def row_bytes(self, joint: Joint, inputs: Inputs) -> int:
        """Bytes that each row takes while its share is computed."""


def over_members(
    function: MemberFunction,
    joint: Joint | Density,
    theta: Tensor,
    batch: Batch | None,
    buffers: Buffers | None,
    row_bytes: int = 0,
) -> Tensor:
    """The sum over rows `function(joint, theta, batch, buffers)` for theta (P,), or stacked for the members of (M, P).

    Members and rows go in chunks that fit the memory budget, at `row_bytes` for each row of a member. Buffers have a
    member axis where theta has one.
    """
    members = 1 if theta.dim() == 1 else min(theta.shape[0], chunk_rows(24 * num_random(joint) ** 2))
    rows = chunk_rows(row_bytes * members)
    total: Tensor | None = None
    for part in [None] if batch is None else _chunks(batch, rows):
        if theta.dim() == 1:
            value = function(joint, theta, part, buffers)
        else:
            value = _mapped(function, joint, theta, part, buffers, members)
        total = value if total is None else total + value
    assert total is not None
    return total


def _chunks(batch: Batch, size: int) -> list[Batch]:
    axis = 1 if batch.per_member else 0
    return [
        batch.map(lambda tensor, low=low: tensor.narrow(axis, low, min(size, batch.size - low)))  # type: ignore[misc]
        for low in range(0, batch.size, size)
    ]


def _mapped(
    function: MemberFunction,
    joint: Joint | Density,
    theta: Tensor,
    batch: Batch | None,
    buffers: Buffers | None,
    together: int,
) -> Tensor:
    """`function` for every member: by vmap, or one after the other where that cannot be."""
    if isinstance(joint, Joint) and joint.likelihood.member(0) is not joint.likelihood:
        return _looped(function, joint, theta, batch, buffers)  # each member has its own likelihood
    axis = 0 if batch is not None and batch.per_member else None
    rows = None if batch is None else (batch.inputs, batch.targets, batch.weights)
    rows_axes = None if batch is None else (axis, axis, None if batch.weights is None else axis)

    def one(weights: Tensor, rows: tuple[Inputs, Tensor, Tensor | None] | None, buffers: Buffers | None) -> Tensor:
        return function(joint, weights, None if rows is None else Batch(*rows), buffers)

    mapped = torch.func.vmap(one, in_dims=(0, rows_axes, None if buffers is None else 0), chunk_size=together)
    try:
        result: Tensor = mapped(theta, rows, buffers)
        return result
    except VMAP_REFUSALS as error:
        result = _looped(function, joint, theta, batch, buffers)  # raises if the model is at fault
        log_refusal("members", error)
        return result


def _looped(
    function: MemberFunction, joint: Joint | Density, theta: Tensor, batch: Batch | None, buffers: Buffers | None
) -> Tensor:
    return torch.stack(
        [
            function(
                joint.member(index),
                theta[index],
                None if batch is None else batch.member(index),
                None if buffers is None else {name: b[index] for name, b in buffers.items()},
            )
            for index in range(theta.shape[0])
        ]
    )


def log_refusal(what: str, error: Exception) -> None:
    """Say, once for each reason, that `what` goes one after the other."""
    _log_once(what, str(error).splitlines()[0] if str(error) else type(error).__name__)


@cache
def _log_once(what: str, reason: str) -> None:
    logger.warning("%s go one after the other, which is slow, because vmap refused this module: %s", what, reason)


@contextmanager
def torch_kernels(network: Network) -> Iterator[None]:
    """Where torch.func differentiates recurrent layers: by torch's own kernels, since cuDNN's take no such tensors.

    On CUDA they have no batching rule, so vmap goes through them one by one: said once, in place of torch's warning.
    """
    if not network.recurrent:
        yield
        return
    if network.device.type == "cuda":
        _log_once("derivatives of recurrent layers", "their kernels have no batching rule")
    with torch.backends.cudnn.flags(enabled=False), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="There is a performance drop")
        yield


def weights_function(joint: Joint, theta: Tensor) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """(rebuild, random): `rebuild(random)` is the whole weight vector with the random weights replaced."""
    index = joint.random_indices
    weights = theta[: joint.num_weights].detach()
    if index is None:
        return (lambda random: random), weights
    return (lambda random: weights.index_copy(0, index, random)), weights[index]


def likelihood_at(joint: Joint, theta: Tensor) -> Likelihood:
    """The joint's likelihood with the learnt parameters that theta (P,) ends in."""
    return joint.likelihood.with_free(joint.split(theta)[1]) if joint.likelihood.num_free else joint.likelihood


def num_random(joint: Joint | Density) -> int:
    """How many weights R the curvature is over."""
    return joint.num_weights if joint.random_indices is None else joint.random_indices.numel()


def first_row(inputs: Inputs) -> Inputs:
    """The first row, (1, ...)."""
    return map_inputs(lambda tensor: tensor[:1], inputs)
