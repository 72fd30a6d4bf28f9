"""Backward passes of a joint: leaves of the graph, members side by side, and the log-likelihood of a batch."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

import torch
from torch import Tensor
from torch.autograd.variable import Variable

from posterity.errors import BadData
from posterity.likelihoods.likelihood import Likelihood
from posterity.model.batch import Batch
from posterity.model.network import Buffers, Network
from posterity.model.weights import weighted_log_prob

_KEPT = 4  # a step uses one or two pairs of vectors
LANES = 4  # passes side by side on a GPU: deep layers have few pixels, and are too small to fill it alone

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Leaves:
    """The weights as leaves of a graph, with gradients that are views into one flat vector: backward adds to it."""

    weights: list[Tensor]
    raw: Tensor  # the likelihood's learnt parameters

    @classmethod
    def at(cls, network: Network, theta: Tensor, grad: Tensor) -> "Leaves":
        """Leaves that share the memory of theta (T,), whose gradients are views into `grad` (T,); contiguous."""
        size = network.layout.size
        flat = theta.detach()
        weights, raw = network.views(flat[:size]), flat[size:]
        for leaf, slot in zip([*weights, raw], [*network.views(grad[:size]), grad[size:]], strict=True):
            leaf.requires_grad_().grad = slot
        return cls(weights, raw)


class LeavesCache:
    """The leaves last used, for steps that write into the same memory each time."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int], Leaves] = {}

    def __reduce__(self) -> tuple[type["LeavesCache"], tuple[()]]:
        return LeavesCache, ()  # leaves belong to the memory of this process

    def at(self, network: Network, theta: Tensor, grad: Tensor) -> Leaves:
        """The leaves of theta and `grad` (T,). Kept leaves hold their memory, so its address is not reused."""
        address = theta.data_ptr(), grad.data_ptr()
        leaves = self._kept.get(address)
        if leaves is None or leaves.raw.shape[0] + network.layout.size != theta.shape[0]:
            leaves = Leaves.at(network, theta, grad)
            for old in [*self._kept][: 1 - _KEPT]:
                self._kept.pop(old, None)  # another thread may have
            self._kept[address] = leaves
        return leaves


class _Streams(threading.local):
    def __init__(self) -> None:
        self.of: dict[torch.device, list[torch.cuda.Stream]] = {}


_STREAMS = _Streams()


def side_by_side(passes: Sequence[Callable[[], T]], device: torch.device) -> list[T]:
    """Results of the passes, which on a GPU share LANES streams, also within a recorded step.

    The streams wait for all that is queued, and what is queued afterwards waits for them, so that memory that one of
    them has freed is not used again too early.
    """
    if device.type != "cuda" or LANES == 1 or len(passes) == 1:
        return [run() for run in passes]
    caller = torch.cuda.current_stream(device)
    streams = _STREAMS.of.setdefault(device, [])
    while len(streams) < LANES:
        streams.append(torch.cuda.Stream(device))  # type: ignore[no-untyped-call, unused-ignore]
    used = streams[: min(LANES, len(passes))]
    for stream in used:
        stream.wait_stream(caller)
    results: list[T] = []
    try:
        for index, run in enumerate(passes):
            with torch.cuda.stream(used[index % len(used)]):
                results.append(run())
    finally:
        for stream in used:
            caller.wait_stream(stream)
    return results


def batch_total(
    network: Network,
    likelihood: Likelihood,
    weights: Sequence[Tensor],
    raw: Tensor,
    batch: Batch,
    buffers: Buffers | None,
    *,
    members: bool = False,
    train: bool,
) -> tuple[Tensor, Buffers]:
    """The log-likelihood of the batch alone, with its graph, and the running statistics after the call."""
    with torch.enable_grad():
        try:
            outputs, after = network.run(
                weights, batch.inputs, buffers, members=members, per_member=batch.per_member, train=train
            )
        except ValueError as error:
            if "more than 1 value per channel" not in str(error):
                raise
            raise BadData(
                f"Batch norm cannot train on {batch.size} row. Pass more rows, or a loader with drop_last=True."
            ) from error
        return batch_log_likelihood(likelihood, raw, outputs, batch), after


def batch_log_likelihood(likelihood: Likelihood, raw: Tensor, outputs: Tensor, batch: Batch) -> Tensor:
    """sum_n w_n log p(y_n | f_n) over the rows of the batch, (...), given the raw learnt parameters (..., H)."""
    if not batch.per_member and batch.weights is None:
        targets = _targets(likelihood, raw, outputs, batch)
        likelihood = likelihood.with_free(raw) if raw.shape[-1] else likelihood
        if batch.complete or not batch.targets.is_floating_point():  # no label costs more for being missing
            return likelihood.total_log_prob(outputs, targets)
        return likelihood.log_prob(outputs, targets).sum(-1)
    return row_log_likelihoods(likelihood, raw, outputs, batch).sum(-1)


def batch_slope(
    likelihood: Likelihood, raw: Tensor, outputs: Tensor, batch: Batch, factor: float
) -> tuple[Tensor, Tensor]:
    """The log-likelihood of a batch, and `factor` times its gradient in the outputs (n, C), which have no graph.

    `factor` times the gradient in the raw learnt parameters is added to `raw.grad`.
    """
    if batch.weights is None and not raw.shape[-1]:
        targets = _targets(likelihood, raw, outputs, batch)
        if batch.complete or not targets.is_floating_point():
            known = likelihood.total_and_slope(outputs, targets, factor)
            if known is not None:
                return known
    leaf = outputs.detach().requires_grad_()
    with torch.enable_grad():
        total = batch_log_likelihood(likelihood, raw, leaf, batch)
    backward(total, factor)
    return total.detach(), torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def add_gradients(
    network: Network,
    likelihood: Likelihood,
    leaves: Leaves,
    batch: Batch,
    buffers: Buffers | None,
    factor: float | Tensor,
    train: bool,
) -> tuple[Tensor, Buffers]:
    """`factor` times the log-likelihood of a batch, whose gradient is added to that of the leaves; and the buffers."""

    def run(rows: Batch) -> tuple[Tensor, Buffers]:
        total, after = batch_total(network, likelihood, leaves.weights, leaves.raw, rows, buffers, train=train)
        backward(total, cast(float, factor))
        return total.detach() * factor, after

    return network.passes.over(batch, run)


def write_gradients(
    network: Network,
    likelihood: Likelihood,
    leaves: Leaves,
    out: Tensor,
    batch: Batch,
    buffers: Buffers | None,
    factor: float | Tensor,
    train: bool,
) -> tuple[Tensor, Buffers]:
    """As `add_gradients`, in place of what the vector `out` holds, into which the gradients of the leaves are views."""
    chain, totals = network.direct(batch.inputs), list[Tensor]()
    if chain is None:
        out.zero_()
        return add_gradients(network, likelihood, leaves, batch, buffers, factor, train)
    out[network.layout.size :].zero_()

    def slope(outputs: Tensor) -> Tensor:
        total, grad = batch_slope(likelihood, leaves.raw, outputs, batch, cast(float, factor))
        totals.append(total)
        return grad

    chain.gradients(leaves.weights, cast(Tensor, batch.inputs), slope)
    return totals[0] * factor, {}


def row_log_likelihoods(likelihood: Likelihood, raw: Tensor, outputs: Tensor, batch: Batch) -> Tensor:
    """w_n log p(y_n | f_n) of each row of the batch, (..., n), given the raw learnt parameters (..., H)."""
    targets, weights = _targets(likelihood, raw, outputs, batch), batch.weights
    if not batch.per_member:
        likelihood = likelihood.with_free(raw) if raw.shape[-1] else likelihood
        return weighted_log_prob(likelihood, outputs, targets, weights)
    if likelihood.member(0) is not likelihood:
        own = [likelihood.member(index).with_free(raw[index]) for index in range(len(targets))]
        each = zip(own, outputs, targets, [None] * len(own) if weights is None else weights, strict=True)
        return torch.stack([weighted_log_prob(*member) for member in each])
    if raw.shape[-1]:  # members share all but the learnt parameters
        over = torch.func.vmap(
            lambda own, f, y, w: weighted_log_prob(likelihood.with_free(own), f, y, w),
            in_dims=(0, 0, 0, None if weights is None else 0),
        )
        return over(raw, outputs, targets, weights)
    # All rows of all members at once.
    flat = None if weights is None else weights.flatten(0, 1)
    return weighted_log_prob(likelihood, outputs.flatten(0, 1), targets.flatten(0, 1), flat).view(targets.shape[:2])


def _targets(likelihood: Likelihood, raw: Tensor, outputs: Tensor, batch: Batch) -> Tensor:
    """The targets; labels of a batch that no joint has checked are checked here."""
    if batch.checked or batch.targets.is_floating_point():
        return batch.targets
    return checked_targets(likelihood.member(0), outputs[(0,) * (raw.dim() - 1)], batch)


def checked_targets(likelihood: Likelihood, outputs: Tensor, batch: Batch) -> Tensor:
    """Return the targets as the likelihood needs them for outputs (N, *event); raise BadData for bad labels."""
    if not batch.per_member:
        return likelihood.check(outputs, batch.targets)
    return torch.stack([likelihood.check(outputs, rows) for rows in batch.targets])


def backward(value: Tensor, factor: float) -> None:
    """Compute `(factor * value).backward()` for a value () with a graph; `factor` has none.

    The checks of `Tensor.backward` take as long as the layers of a small network.

    >>> leaf = torch.tensor(3.0, requires_grad=True)
    >>> backward(leaf.square(), 0.5)
    >>> leaf.grad
    tensor(3.)
    """
    grad = torch.full((), factor, dtype=value.dtype, device=value.device)
    Variable._execution_engine.run_backward(
        (value,), (grad,), False, False, (), allow_unreachable=True, accumulate_grad=True
    )
