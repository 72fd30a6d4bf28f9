"""Backward passes of a joint: leaves of the graph, one member after the other, the likelihood of a batch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor
from torch.autograd.variable import Variable

from posterity.likelihoods.likelihood import Likelihood
from posterity.model.batch import Batch
from posterity.model.network import Buffers, Network

_KEPT = 4  # a step uses one pair of places or two


@dataclass(frozen=True, eq=False)
class Seat:
    """The weights as leaves of a graph, whose gradients are views into one flat vector: backward adds to it in place.

    Takes the network, theta (T,) of its weights and the likelihood's learnt parameters behind them, and a vector (T,)
    for the gradient, both contiguous.
    """

    leaves: list[Tensor]
    raw: Tensor

    @classmethod
    def at(cls, network: Network, theta: Tensor, grad: Tensor) -> "Seat":
        """Leaves that share the memory of theta, with gradients in that of `grad`."""
        size = network.layout.size
        flat = theta.detach()
        leaves, raw = network.views(flat[:size]), flat[size:]
        for leaf, place in zip([*leaves, raw], [*network.views(grad[:size]), grad[size:]], strict=True):
            leaf.requires_grad_().grad = place
        return cls(leaves, raw)


class Seats:
    """The seats last used: steps that write into the same memory each time find theirs made."""

    def __init__(self) -> None:
        """None yet."""
        self._kept: dict[tuple[int, int], Seat] = {}

    def __reduce__(self) -> tuple[type["Seats"], tuple[()]]:
        return Seats, ()  # they belong to the memory of this process

    def at(self, network: Network, theta: Tensor, grad: Tensor) -> Seat:
        """The seat of theta and `grad` (T,). A kept one holds on to its memory, so its address is nobody else's."""
        place = theta.data_ptr(), grad.data_ptr()
        seat = self._kept.get(place)
        if seat is None or seat.raw.shape[0] + network.layout.size != theta.shape[0]:
            seat = Seat.at(network, theta, grad)
            for old in [*self._kept][: 1 - _KEPT]:
                self._kept.pop(old, None)  # another thread may have
            self._kept[place] = seat
        return seat


One: TypeAlias = Callable[[Tensor, Batch, Buffers, Tensor], tuple[Tensor, Buffers]]


def in_turn(
    network: Network, theta: Tensor, batch: Batch, buffers: Buffers | None, grad: Tensor, ones: Sequence[One]
) -> tuple[Tensor, Buffers]:
    """Values (M,) and buffers of the members of theta (M, P), to whose gradients (M, P) each of `ones` adds its own.

    It takes a member's theta (P,), batch, buffers and place for the gradient. Only one member's activations are there
    at a time.
    """
    buffers = network.buffers if buffers is None else buffers
    found = [
        one(theta[index], batch.member(index), network.buffers_of(buffers, index), grad[index])
        for index, one in enumerate(ones)
    ]
    after = {name: torch.stack([own[name] for _, own in found]) for name in buffers}
    return torch.stack([value for value, _ in found]), after


def batch_log_likelihood(likelihood: Likelihood, raw: Tensor, outputs: Tensor, batch: Batch) -> Tensor:
    """sum_n w_n log p(y_n | f_n) over the rows of the batch, (...), given the raw learnt parameters (..., H)."""
    if batch.weights is None and not batch.per_member:
        return (likelihood.with_free(raw) if raw.shape[-1] else likelihood).total_log_prob(outputs, batch.targets)
    rows = _rows(likelihood, raw, outputs, batch)
    return rows.sum(-1) if batch.weights is None else (rows * batch.weights).sum(-1)


def _rows(likelihood: Likelihood, raw: Tensor, outputs: Tensor, batch: Batch) -> Tensor:
    """Log-likelihood of each row of the batch, (..., n)."""
    targets = batch.targets
    if not batch.per_member:
        return (likelihood.with_free(raw) if raw.shape[-1] else likelihood).log_prob(outputs, targets)
    shared = likelihood.member(0) is likelihood
    if shared and not raw.shape[-1]:  # the rows of all members are alike
        return likelihood.log_prob(outputs.flatten(0, 1), targets.flatten(0, 1)).view(targets.shape[:2])
    if shared:  # but for what it learns
        each_own = torch.func.vmap(lambda own, f, y: likelihood.with_free(own).log_prob(f, y))
        rows: Tensor = each_own(raw, outputs, targets)
        return rows
    each = [
        likelihood.member(index).with_free(raw[index]).log_prob(outputs[index], targets[index])
        for index in range(targets.shape[0])
    ]
    return torch.stack(each)


def backward(value: Tensor, factor: float) -> None:
    """`(factor * value).backward()` for a value () of one's own; `factor` is no part of the graph.

    What `Tensor.backward` asks of its arguments takes as long as the layers of a small network.

    >>> leaf = torch.tensor(3.0, requires_grad=True)
    >>> backward(leaf.square(), 0.5)
    >>> leaf.grad
    tensor(3.)
    """
    grad = torch.full((), factor, dtype=value.dtype, device=value.device)
    Variable._execution_engine.run_backward(
        (value,), (grad,), False, False, (), allow_unreachable=True, accumulate_grad=True
    )
