"""Whole Jacobians by torch.func, for weights that act in ways no rule knows."""

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from posterity.model.inputs import Inputs, map_inputs, num_rows
from posterity.model.joint import Joint
from posterity.model.network import Buffers, Network
from posterity.numerics.autodiff import row_jacobians

logger = logging.getLogger("posterity")

VMAP_REFUSALS = (RuntimeError, NotImplementedError, ValueError)


def explicit_jacobian(
    joint: Joint, theta: Tensor, names: Sequence[str], inputs: Inputs, buffers: Buffers | None
) -> Tensor:
    """d outputs / d (the named tensors, one after the other), (n, D, size)."""
    slices = {part.name: part for part in joint.network.layout}
    index = torch.cat([torch.arange(slices[n].offset, slices[n].offset + slices[n].size) for n in names])
    index = index.to(theta.device)
    weights = theta[: joint.num_weights].detach()

    def one(chosen: Tensor, row: Inputs) -> Tensor:
        single = map_inputs(lambda tensor: tensor.unsqueeze(0), row)
        return joint.network.outputs(weights.index_copy(0, index, chosen), single, buffers).squeeze(0)

    with torch_kernels(joint.network):
        try:
            _, jacobian = row_jacobians(one, weights[index], inputs)  # type: ignore[arg-type]
        except VMAP_REFUSALS as error:
            jacobian = _looped_jacobians(one, weights[index], inputs)  # raises if the model is at fault
            log_refusal("rows", error)
    return jacobian


def _looped_jacobians(function: Callable[[Tensor, Inputs], Tensor], theta: Tensor, rows: Inputs) -> Tensor:
    """Without vmap: one row and one output after the other."""
    jacobians = []
    for index in range(num_rows(rows)):
        row = map_inputs(lambda tensor, index=index: tensor[index], rows)  # type: ignore[misc]
        output, backward = torch.func.vjp(lambda w, row=row: function(w, row).reshape(-1), theta)  # type: ignore[misc]
        basis = torch.eye(output.numel(), dtype=output.dtype, device=output.device)
        jacobians.append(torch.stack([backward(direction)[0] for direction in basis]))
    return torch.stack(jacobians)


def log_refusal(what: str, error: Exception) -> None:
    """Say, once for each reason, that `what` goes one after the other."""
    _log_once(what, str(error).splitlines()[0] if str(error) else type(error).__name__)


@cache
def _log_once(what: str, reason: str) -> None:
    logger.warning("%s go one after the other, which is slow, because vmap refused this module: %s", what, reason)


@contextmanager
def plain_recurrence(network: Network) -> Iterator[None]:
    """Where a backward pass follows in evaluation mode, for which cuDNN's recurrent layers are not made."""
    if not network.recurrent:
        yield
        return
    with torch.backends.cudnn.flags(enabled=False):
        yield


@contextmanager
def torch_kernels(network: Network) -> Iterator[None]:
    """Where torch.func differentiates: by torch's own kernels, since fused ones take no such tensors.

    Operations without a batching rule (recurrent layers on CUDA, weight norm) go one by one under vmap, without
    torch's warning each time; those of recurrent layers are slow, which is said once. Fused attention has none either.
    """
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="There is a performance drop")
            if not network.recurrent:
                yield
                return
            if network.device.type == "cuda":
                _log_once("derivatives of recurrent layers", "their kernels have no batching rule")
            with torch.backends.cudnn.flags(enabled=False):
                yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
