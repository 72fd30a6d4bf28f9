"""Whole Jacobians by `torch.func`, and the kernels of torch that can be differentiated."""

import logging
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves, tree_map

from posterity.model.batch import Inputs, map_inputs, num_rows
from posterity.model.joint import Joint
from posterity.model.network import Buffers, Network
from posterity.numerics.autodiff import row_jacobians

logger = logging.getLogger("posterity")

VMAP_REFUSALS = (RuntimeError, NotImplementedError, ValueError)


def explicit_jacobian(
    joint: Joint,
    theta: Tensor,
    names: Sequence[str],
    inputs: Inputs,
    buffers: Buffers | None,
    columns: Tensor | None = None,
) -> Tensor:
    """Jacobian in the named tensors, concatenated, of outputs (n, D, size), or of columns (K, n, *event) of them."""
    slices = {part.name: part for part in joint.network.layout}
    index = torch.cat([torch.arange(slices[n].offset, slices[n].offset + slices[n].size) for n in names])
    index = index.to(theta.device)
    weights = theta[: joint.num_weights].detach()

    def row_outputs(chosen: Tensor, row: Any) -> Tensor:
        given, own = row if columns is not None else (row, None)
        single = map_inputs(lambda tensor: tensor.unsqueeze(0), given)
        outputs = joint.network.outputs(weights.index_copy(0, index, chosen), single, buffers).squeeze(0)
        return outputs if own is None else (own * outputs).flatten(1).sum(1)

    rows = inputs if columns is None else (inputs, columns.transpose(0, 1))
    with torch_kernels(joint.network):
        try:
            _, jacobian = row_jacobians(row_outputs, weights[index], rows)
        except VMAP_REFUSALS as error:
            # Raises if the model is at fault.
            jacobian = _looped_jacobians(row_outputs, weights[index], rows, num_rows(inputs))
            log_refusal("rows", error)
    return jacobian


def _looped_jacobians(function: Callable[[Tensor, Any], Tensor], theta: Tensor, rows: Any, count: int) -> Tensor:
    """Jacobians by plain autograd, one row and one output at a time."""
    differentiable = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tree_leaves(rows))
    options: dict[str, Any] = {"retain_graph": True, "create_graph": differentiable, "materialize_grads": True}
    jacobians = []
    for index in range(count):
        leaf = theta.detach().requires_grad_()
        with torch.enable_grad():
            outputs = function(leaf, tree_map(lambda tensor, index=index: tensor[index], rows)).reshape(-1)
            values = (outputs + 0.0 * leaf.sum()).unbind()  # with a graph even if they depend on none of these weights
        jacobians.append(torch.stack([torch.autograd.grad(value, leaf, **options)[0] for value in values]))
    return torch.stack(jacobians)


def log_refusal(what: str, error: Exception) -> None:
    """Log, once for each reason, whatever the shapes, that `what` is computed one at a time."""
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    _log_once(what, re.sub(r"\[[\d, ]+\]", "[...]", reason))


@cache
def _log_once(what: str, reason: str) -> None:
    logger.warning("%s go one after the other, which is slow, because vmap refused this module: %s", what, reason)


def plain_recurrence(network: Network) -> AbstractContextManager[None]:
    """Turn cuDNN off for recurrent layers, which it cannot differentiate in evaluation mode."""
    return torch.backends.cudnn.flags(enabled=False) if network.recurrent else nullcontext()


@contextmanager
def float32_products() -> Iterator[None]:
    """Multiply float32 matrices in float32 even where torch may use TF32, which rounds a row by the batch around it."""
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError:  # it was chosen for CUDA alone, after which torch refuses to say it for all devices
        products: Any = torch.backends.cuda.matmul
        chosen, products.fp32_precision = products.fp32_precision, "ieee"
        try:
            yield
        finally:
            products.fp32_precision = chosen
        return
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def _without_onednn(network: Network) -> Iterator[None]:
    """Turn oneDNN off for recurrent layers: its LSTM has no derivative under torch.func."""
    enabled = (
        torch._C._get_mkldnn_enabled()
    )  # torch.backends.mkldnn.flags sets TF32, too, which warns without Intel's GPU
    torch._C._set_mkldnn_enabled(enabled and not network.recurrent)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(enabled)


@contextmanager
def derivatives_of_gradients(remedy: str) -> Iterator[None]:
    """Raise a ValueError with the remedy where an operation of the model has no derivative of its gradient."""
    try:
        yield
    except RuntimeError as error:
        if not any(words in str(error) for words in ("is not implemented", "differentiate twice")):
            raise
        reason = str(error).splitlines()[0].rstrip(".")
        raise ValueError(
            f"This takes derivatives of gradients, which the model does not have: {reason}. {remedy}"
        ) from error


@contextmanager
def torch_kernels(network: Network) -> Iterator[None]:
    """Use torch's plain kernels, which torch.func can differentiate; it cannot differentiate fused or oneDNN's ones.

    Operations without a batching rule (recurrent layers on CUDA, weight norm) run one at a time under vmap, without
    torch's warning each time; recurrent layers are slow, which is logged once. Fused attention has no rule either.
    """
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with (
            sdpa_kernel(SDPBackend.MATH),
            warnings.catch_warnings(),
            plain_recurrence(network),
            _without_onednn(network),
        ):
            warnings.filterwarnings("ignore", message="There is a performance drop")
            if network.recurrent and network.device.type == "cuda":
                _log_once("derivatives of recurrent layers", "their kernels have no batching rule")
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
