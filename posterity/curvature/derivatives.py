"""Derivatives of network outputs in the random weights, in factors, for many rows and columns."""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from weakref import WeakSet

import torch
from torch import Tensor

from posterity.curvature.survey import Survey, explicit_jacobian, log_refusal, plain_recurrence, survey
from posterity.jacobians.head import Head
from posterity.jacobians.jacobian import Explicit, Jacobian, Selected, Stacked
from posterity.jacobians.uses import Use, WeightUses
from posterity.model.batch import Inputs, map_inputs, named_tensors, num_rows
from posterity.model.joint import Joint
from posterity.model.network import Buffers
from posterity.numerics.autodiff import MEMORY_BUDGET
from posterity.numerics.layout import Block

logger = logging.getLogger("posterity")

CACHE = 1 << 25  # bytes to which the work on one chunk of rows is kept on a CPU: larger ones wait for memory
UNIT_CACHE = 1 << 24  # the same for Jacobians, whose pieces are gone over more often
DEVICE = 5 << 29  # the same on a GPU, which wants many rows at a time
LEAST_ROWS = 16

_SAID: WeakSet[Survey] = WeakSet()

Columns = Callable[[Tensor, int], Tensor]


@dataclass(frozen=True, eq=False)
class Piece:
    """Derivatives of some columns at some rows: `jacobian` (n, K, R) of the rows from `low` on.

    `outputs` (n, *event) are those of the rows; `fresh` says that these rows come for the first time: columns that do
    not fit together follow in the next pieces.
    """

    low: int
    outputs: Tensor
    jacobian: Jacobian
    fresh: bool


def derivatives(
    joint: Joint,
    theta: Tensor,
    inputs: Inputs,
    buffers: Buffers | None = None,
    columns: Columns | None = None,
    *,
    count: int | None = None,
    budget: int | None = None,
    whole: bool = False,
) -> Iterator[Piece]:
    """Pieces of the derivatives at theta (P,) of the sums columns * outputs, in the random weights.

    `columns(outputs, low)` gives (K, n, *event) for the rows from `low` on; None stands for the unit vectors, so that
    the pieces are Jacobians with K = D. Rows go in chunks of about `budget` bytes; where one column fits only, columns
    go one after the other, unless `whole` keeps those of a row together. Where inputs require a gradient and gradients
    are on, all results are differentiable. Outputs in the weights of the layer that makes them need no backward pass.
    """
    known = survey(joint, inputs)
    count = max(1, prod(known.event)) if count is None else count
    on_cpu = joint.device.type == "cpu"
    row = row_bytes(joint, known, columns is None)
    at_once = 0 if columns is None and known.only_head else count
    least = 1
    if budget is None:
        budget = (UNIT_CACHE if columns is None else CACHE) if on_cpu else DEVICE
        least = LEAST_ROWS if not whole else max(1, min(LEAST_ROWS, MEMORY_BUDGET // (row * (2 + at_once))))
    if columns is not None:  # those of very many outputs take more than all else
        least = max(1, min(least, MEMORY_BUDGET // (joint.dtype.itemsize * count * max(1, prod(known.event)))))
    rows = max(least, budget // (row * (2 + at_once)))
    differentiable = torch.is_grad_enabled() and requires_grad(inputs)
    for low in range(0, num_rows(inputs), rows):
        part = map_inputs(lambda tensor, low=low: tensor[low : low + rows], inputs)  # type: ignore[misc]
        together = count if whole else max(1, budget // (row * num_rows(part)) - 2)
        yield from _pieces(joint, theta, part, buffers, columns, known, low, together, differentiable)


def row_bytes(joint: Joint, known: Survey, units: bool) -> int:
    """What one row takes for each column; with `units` and nothing but an output layer, what it takes in all."""
    entries = known.row_entries
    if units and known.only_head:
        entries += known.row_features
    return joint.dtype.itemsize * max(1, entries)


def requires_grad(inputs: Inputs) -> bool:
    """Whether any of the tensors does."""
    return any(tensor.requires_grad for tensor in named_tensors(inputs).values())


def _pieces(
    joint: Joint,
    theta: Tensor,
    inputs: Inputs,
    buffers: Buffers | None,
    columns: Columns | None,
    known: Survey,
    low: int,
    together: int,
    differentiable: bool,
) -> Iterator[Piece]:
    weights = [view.detach() for view in joint.network.views(theta[: joint.num_weights].detach())]
    wanted = set(known.tracked)
    tracked = {n: w for n, w in zip(joint.network.layout.names, weights, strict=True) if n in wanted}
    with torch.enable_grad(), plain_recurrence(joint.network), WeightUses(tracked) as seen:
        outputs = joint.network.run(weights, inputs, buffers)[0]
    uses = [use for use in seen.uses if use.names]
    known.check(uses, len(outputs))
    plain = outputs if differentiable else outputs.detach()
    if columns is None and known.only_head and len(uses) == 1 and uses[0].edge.node is outputs.grad_fn:
        source = uses[0].source if differentiable else uses[0].source.detach()
        head = Head(source, uses[0].bias is not None, outputs.shape[1])
        yield Piece(low, plain, Stacked((known.block(uses[0]),), (head,), known.total), fresh=True)
        return
    seeds = _units(plain) if columns is None else columns(plain, low)
    whole = None
    if known.explicit:
        _say(known)
        names = [place.block.names[0] for place in known.places if place.block.names[0] in known.explicit]
        whole = explicit_jacobian(joint, theta, names, inputs, buffers)  # (n, D, size)
    for first in range(0, len(seeds), together):
        some = seeds[first : first + together]
        last = first + together >= len(seeds)
        parts = _used(outputs, uses, some, known, last, differentiable)
        if whole is not None:
            parts += _explicit(whole, some, known)
        if not parts:  # none of the weights is used at all
            zeros = plain.new_zeros(len(plain), len(some), known.total)
            parts = [(Block(tuple(known.offsets), known.total, 1, 0), Explicit(zeros))]
        blocks, jacobians = zip(*parts, strict=True)
        jacobian: Jacobian = Stacked(tuple(blocks), tuple(jacobians), known.total)
        if known.select is not None:
            jacobian = Selected(jacobian, known.select)
        yield Piece(low, plain, jacobian, first == 0)


def _say(known: Survey) -> None:
    """Which weights have no rule, and why; once for each survey."""
    if known not in _SAID:
        _SAID.add(known)
        for name, reason in known.explicit.items():
            logger.info("curvature of '%s' by whole Jacobians, because %s", name, reason)


def _units(outputs: Tensor) -> Tensor:
    """The D unit vectors for every row, (D, n, *event)."""
    size = max(1, prod(outputs.shape[1:]))
    eye = torch.eye(size, dtype=outputs.dtype, device=outputs.device)
    return eye.view(size, 1, *outputs.shape[1:]).expand(size, *outputs.shape)


def _used(
    outputs: Tensor, uses: list[Use], seeds: Tensor, known: Survey, last: bool, differentiable: bool
) -> list[tuple[Block, Jacobian]]:
    """The parts of the weights with rules, by one backward pass for each seed."""
    if not uses:
        return []
    if len(uses) == 1 and uses[0].edge.node is outputs.grad_fn:  # the outputs themselves: nothing to go back through
        return [(known.block(uses[0]), uses[0].jacobian(seeds, differentiable))]
    keep = not last or differentiable
    columns: Sequence[Sequence[Tensor] | Tensor]
    if outputs.device.type != "cpu" and len(seeds) > 1 and not differentiable:
        columns = _together(outputs, uses, seeds, keep)
    else:
        columns = _in_turn(outputs, uses, seeds, keep, differentiable)
    return [(known.block(use), use.jacobian(of, differentiable)) for use, of in zip(uses, columns, strict=True)]


def _in_turn(outputs: Tensor, uses: list[Use], seeds: Tensor, keep: bool, differentiable: bool) -> list[list[Tensor]]:
    """For each use, derivatives in its output of every column: one backward pass after the other."""
    edges = [use.edge for use in uses]
    collected = []
    for number, seed in enumerate(seeds):
        more = keep or number + 1 < len(seeds)
        grads = torch.autograd.grad(
            outputs, edges, seed, retain_graph=more, create_graph=differentiable, allow_unused=True
        )
        collected.append(grads)
    return [
        [outputs.new_zeros(use.output_shape) if grad is None else grad for grad in grads]
        for use, grads in zip(uses, zip(*collected, strict=True), strict=True)
    ]


def _together(outputs: Tensor, uses: list[Use], seeds: Tensor, keep: bool) -> Sequence[Sequence[Tensor] | Tensor]:
    """The same in one backward pass over all columns, which a GPU does in the time of a few."""
    edges = [use.edge for use in uses]
    try:
        found = torch.autograd.grad(outputs, edges, seeds, retain_graph=True, allow_unused=True, is_grads_batched=True)
    except (RuntimeError, NotImplementedError, ValueError) as error:
        columns = _in_turn(outputs, uses, seeds, keep, differentiable=False)  # raises if the model is at fault
        log_refusal("columns", error)
        return columns
    return [
        outputs.new_zeros((len(seeds), *use.output_shape)) if grad is None else grad
        for use, grad in zip(uses, found, strict=True)
    ]


def _explicit(whole: Tensor, seeds: Tensor, known: Survey) -> list[tuple[Block, Jacobian]]:
    """The parts of the weights without rules, from their whole Jacobian (n, D, size)."""
    flat = seeds.flatten(2) if seeds.dim() > 2 else seeds.unsqueeze(-1)  # (K, n, D)
    rows = torch.einsum("knd,ndr->nkr", flat, whole)
    parts: list[tuple[Block, Jacobian]] = []
    first = 0
    for place in known.places:
        if place.block.names[0] in known.explicit:
            parts.append((place.block, Explicit(rows[..., first : first + place.block.size])))
            first += place.block.size
    return parts
