"""Factored Jacobians of network outputs in the random weights, in chunks of rows and columns."""

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from weakref import WeakSet

import torch
from torch import Tensor

from posterity.curvature.explicit import VMAP_REFUSALS, explicit_jacobian, log_refusal, plain_recurrence
from posterity.curvature.survey import Survey, is_output, survey
from posterity.jacobians.head import Head
from posterity.jacobians.jacobian import Explicit, Jacobian, Selected, Stacked, small_parts
from posterity.jacobians.linear import Matrix, Thin
from posterity.jacobians.output_layer import OutputLayer
from posterity.jacobians.recording import WeightUses
from posterity.jacobians.uses import Use, widened
from posterity.model.batch import Inputs, map_inputs, named_tensors, num_rows
from posterity.model.joint import Joint
from posterity.model.network import Buffers
from posterity.numerics.autodiff import MEMORY_BUDGET
from posterity.numerics.layout import Block

logger = logging.getLogger("posterity")

CACHE = 1 << 25  # bytes per chunk of rows on a CPU: larger chunks wait for memory
UNIT_CACHE = 1 << 24  # the same for Jacobians, whose chunks are read more often
DEVICE = 5 << 29  # the same on a GPU, which needs many rows at a time
LEAST_ROWS = 16
MANY = 64  # outputs from which weights without a rule are differentiated column by column

_SAID: WeakSet[Survey] = WeakSet()

Columns = Callable[[Tensor, int], Tensor]
Probabilities = Callable[[Tensor, int], tuple[Tensor, Tensor | None]]


@dataclass(frozen=True, eq=False)
class Piece:
    """Outputs (n, *event) and derivatives (n, K, R) of some columns, at the rows from `low` on.

    `fresh` is False where the rows have been seen with other columns: those that do not fit in memory together come in
    further pieces. `slope` (R,) is the sum over these rows of the derivatives of a column of its own, where it is asked
    for, in the first of them.
    """

    low: int
    outputs: Tensor
    jacobian: Jacobian
    fresh: bool
    slope: Tensor | None = None


def derivatives(
    joint: Joint,
    theta: Tensor,
    inputs: Inputs,
    buffers: Buffers | None = None,
    columns: Columns | None = None,
    *,
    probabilities: Probabilities | None = None,
    count: int | None = None,
    budget: int | None = None,
    whole: bool = False,
    slope: Callable[[Tensor, int], Tensor] | None = None,
) -> Iterator[Piece]:
    """Yield derivatives at theta (P,) of the sums columns * outputs in the random weights, in pieces.

    `columns(outputs, low)` gives (K, n, *event) for the rows from `low` on; None stands for the unit vectors, so that
    the pieces are Jacobians with K = D. Rows come in chunks of about `budget` bytes; columns that do not fit come in
    further pieces, unless `whole` keeps the columns of a row together. With `probabilities(outputs, low)`, which gives
    class probabilities (n, C, *positions) and weights (n,) or (n, *positions), the output layer of the survey is an
    `OutputLayer` in the first piece of each chunk, and the columns are for all other layers. Where inputs require a
    gradient and gradients are on, all results are differentiable. The output layer alone needs no backward pass.
    `slope(outputs, low)` (n, *event) is one more column, whose derivatives are summed over rows; all weights must have
    a rule, and none a closed form.
    """
    known = survey(joint, inputs)
    count = max(1, prod(known.event)) if count is None else count
    on_cpu = joint.device.type == "cpu"
    row = row_bytes(joint, known, columns is None)
    alone = known.only_output and (columns is None or probabilities is not None)
    at_once = 0 if alone else count
    least, limit = 1, budget or 0
    if budget is None:
        limit = (UNIT_CACHE if columns is None else CACHE) if on_cpu else DEVICE
        least = LEAST_ROWS if not whole else max(1, min(LEAST_ROWS, MEMORY_BUDGET // (row * (2 + at_once))))
    if columns is not None and not alone:  # with very many outputs, columns take most of the memory
        least = max(1, min(least, MEMORY_BUDGET // (joint.dtype.itemsize * count * max(1, prod(known.event)))))
    rows = max(least, limit // (row * (2 + at_once)))
    differentiable = torch.is_grad_enabled() and any(t.requires_grad for t in named_tensors(inputs).values())
    weights = [view.detach() for view in joint.network.views(theta[: joint.num_weights].detach())]
    wanted, named = set(known.tracked), zip(joint.network.layout.names, weights, strict=True)
    tracked = {name: weight for name, weight in named if name in wanted}

    def pieces(low: int) -> Iterator[Piece]:
        """Pieces of one chunk of rows, whose graph is freed before the next chunk."""
        part = map_inputs(lambda tensor: tensor[low : low + rows], inputs)
        together = count if whole else max(1, limit // (row * num_rows(part)) - 2)
        with torch.enable_grad(), plain_recurrence(joint.network), WeightUses(tracked) as seen:
            outputs = joint.network.run(weights, part, buffers)[0]
        uses = known.checked([use for use in seen.uses if use.names], len(outputs))
        plain = outputs if differentiable else outputs.detach()
        if columns is None and alone and len(uses) == 1 and is_output(uses[0], outputs):
            source = uses[0].label_features(differentiable)
            assert source is not None
            head = Head(source, uses[0].bias is not None, outputs.shape[1], None, outputs[0, 0].numel())
            yield Piece(low, plain, Stacked((known.block(uses[0]),), (head,), known.total), fresh=True)
            return
        last: list[tuple[Block, Jacobian]] = []
        if probabilities is not None:
            made = [use for use in uses if known.block(use) == known.output and is_output(use, outputs)]
            if len(made) != 1 or known.output is None:
                raise ValueError(
                    "The layer that makes the outputs must be the same for all rows. It was another for the rows "
                    "looked at first. Let the network end in one layer whatever the inputs."
                )
            last = [(known.output, _output_layer(outputs, made[0], *probabilities(plain, low)))]
            if alone:
                yield Piece(low, plain, Stacked((known.output,), (last[0][1],), known.total), fresh=True)
                return
            uses = [use for use in uses if use is not made[0]]
        seeds = _units(plain) if columns is None else columns(plain, low)
        few = columns is not None and len(seeds) < plain[0].numel() > MANY  # columns cost less than the whole Jacobian
        rest = _explicit_rows(joint, theta, part, buffers, known, seeds if few else None) if known.explicit else None
        descent: Tensor | None = None
        if slope is not None and uses:
            blocks, jacobians = zip(*_used(outputs, uses, slope(plain, low)[None], known, False, False), strict=True)
            descent = Stacked(tuple(blocks), tuple(jacobians), known.total).summed()
        for first in range(0, len(seeds), together):
            some = seeds[first : first + together]
            parts = _used(outputs, uses, some, known, first + together >= len(seeds), differentiable)
            if rest is not None:
                parts += _explicit(rest[:, first : first + len(some)] if few else _combined(rest, some), known)
            if not parts:  # the outputs depend on none of the weights
                zeros = plain.new_zeros(len(plain), len(some), known.total)
                parts = [(Block(tuple(known.offsets), known.total, 1, 0), Explicit(zeros))]
            parts += last
            last = [(block, part.narrow(0, 0)) for block, part in last]  # counts once for all columns
            blocks, jacobians = zip(*parts, strict=True)
            jacobian: Jacobian = Stacked(tuple(blocks), tuple(jacobians), known.total)
            if known.select is not None:
                jacobian = Selected(jacobian, known.select)
            yield Piece(low, plain, jacobian, first == 0, descent if first == 0 else None)

    for low in range(0, num_rows(inputs), rows):
        yield from pieces(low)


def _output_layer(outputs: Tensor, use: Use, probabilities: Tensor, weights: Tensor | None) -> OutputLayer:
    """The output layer under these probabilities, whose axes are moved to match the layer."""
    if use.edge.node is not outputs.grad_fn:
        (probabilities,) = torch.autograd.grad(outputs, [use.edge], probabilities, retain_graph=True)
    positions = outputs[0, 0].numel()
    if weights is not None:
        weights = weights.reshape(len(outputs), -1).expand(-1, positions).flatten()
    labels = use.by_label(widened(probabilities))
    return OutputLayer(use.label_features(False), labels, use.bias is not None, weights, positions)


def row_bytes(joint: Joint, known: Survey, units: bool) -> int:
    """Bytes per row and column; with `units` and nothing but an output layer, bytes per row."""
    entries = known.row_entries
    if units and known.only_output:
        entries += known.row_features
    return joint.dtype.itemsize * max(1, entries)


def derivative_bytes(joint: Joint, known: Survey, rows: int, columns: int, made: int | None = None) -> int:
    """Return the bytes of the derivatives of a chunk of rows, where `made` of the `columns` are made (`derivatives`).

    Without columns only an output layer is differentiated: its probabilities and their products are in float64.
    """
    budget = CACHE if joint.device.type == "cpu" else DEVICE
    entry = joint.dtype.itemsize * max(1, known.row_entries)
    chunk = min(rows, max(LEAST_ROWS, budget // (entry * (2 + columns))))
    features = joint.dtype.itemsize * known.row_features
    if not columns:
        return chunk * (2 * entry + 4 * 8 * max(1, prod(known.event)) + 3 * features)
    together = min(columns if made is None else made, max(1, budget // (entry * chunk) - 2))
    # Columns are computed one by one on a CPU, and stacked in layers that act at many positions.
    thin = [place for place in known.places if place.kind == "matrix" and place.positions * place.times == 1]
    apart = known.row_entries - sum(place.block.rows for place in thin)
    again = joint.dtype.itemsize * apart if joint.device.type == "cpu" else entry
    return chunk * (entry * (1 + together) + again * together + features)


def _explicit_rows(
    joint: Joint, theta: Tensor, inputs: Inputs, buffers: Buffers | None, known: Survey, columns: Tensor | None
) -> Tensor:
    """The whole Jacobian (n, D, size) in the weights without a rule, or its products with columns (n, K, size).

    The reasons are logged once for each survey.
    """
    if known not in _SAID:
        _SAID.add(known)
        for name, reason in known.explicit.items():
            logger.info("curvature of '%s' by whole Jacobians, because %s", name, reason)
    names = [place.block.names[0] for place in known.places if place.block.names[0] in known.explicit]
    return explicit_jacobian(joint, theta, names, inputs, buffers, columns)


def _combined(whole: Tensor, seeds: Tensor) -> Tensor:
    """Products (n, K, size) of seeds (K, n, *event) with a Jacobian (n, D, size)."""
    flat = seeds.flatten(2) if seeds.dim() > 2 else seeds.unsqueeze(-1)  # (K, n, D)
    return torch.einsum("knd,ndr->nkr", flat, whole)


def _units(outputs: Tensor) -> Tensor:
    """The D unit vectors for each row, (D, n, *event)."""
    size = max(1, prod(outputs.shape[1:]))
    eye = torch.eye(size, dtype=outputs.dtype, device=outputs.device)
    return eye.view(size, 1, *outputs.shape[1:]).expand(size, *outputs.shape)


def _used(
    outputs: Tensor, uses: list[Use], seeds: Tensor, known: Survey, last: bool, differentiable: bool
) -> list[tuple[Block, Jacobian]]:
    """Jacobians in the weights with rules, by one backward pass for each seed."""
    if not uses:
        return []
    if len(uses) == 1 and uses[0].edge.node is outputs.grad_fn:  # the output layer needs no backward pass
        return [(known.block(uses[0]), uses[0].jacobian(seeds, differentiable))]
    keep = not last or differentiable
    columns: Sequence[Sequence[Tensor] | Tensor]
    if not small_parts(outputs.device) and len(seeds) > 1 and not differentiable:
        columns = _together(outputs, uses, seeds, keep)
    else:
        columns = _in_turn(outputs, uses, seeds, keep, differentiable)
    parts: dict[Block, list[tuple[Use, Sequence[Tensor] | Tensor]]] = {}
    for use, gradients in zip(uses, columns, strict=True):
        parts.setdefault(known.block(use), []).append((use, gradients))
    jacobians: list[tuple[Block, Jacobian]] = []
    for block, own in parts.items():
        each = [use.jacobian(gradients, differentiable) for use, gradients in own]
        maps = [part for part in each if isinstance(part, (Thin, Matrix))]
        if len(each) > 1 and len(maps) == len(each):  # uses by linear maps count as positions
            matrices = [part.matrix if isinstance(part, Thin) else part for part in maps]
            jacobians.append((block, Matrix.at_positions(matrices)))
        else:
            jacobians += [(block, part) for part in each]
    return jacobians


def _in_turn(outputs: Tensor, uses: list[Use], seeds: Tensor, keep: bool, differentiable: bool) -> list[list[Tensor]]:
    """Derivatives of every column in the output of each use, one backward pass at a time."""
    edges = [use.edge for use in uses]
    collected = []
    for number, seed in enumerate(seeds, 1):
        options = {"retain_graph": keep or number < len(seeds), "create_graph": differentiable, "allow_unused": True}
        collected.append(torch.autograd.grad(outputs, edges, seed, **options))
    return [
        [outputs.new_zeros(use.output_shape) if grad is None else grad for grad in grads]
        for use, grads in zip(uses, zip(*collected, strict=True), strict=True)
    ]


def _together(outputs: Tensor, uses: list[Use], seeds: Tensor, keep: bool) -> Sequence[Sequence[Tensor] | Tensor]:
    """The same in one batched backward pass, which takes a GPU the time of a few columns."""
    edges = [use.edge for use in uses]
    reached: list[bool] = []

    def backward(seed: Tensor) -> tuple[Tensor, ...]:
        grads = torch.autograd.grad(outputs, edges, seed, retain_graph=True, allow_unused=True)
        reached[:] = [grad is not None for grad in grads]
        return tuple(grad for grad in grads if grad is not None)

    try:
        # Not by is_grads_batched, which takes convolutions and norms one column at a time, and stacks copies.
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="There is a performance drop")  # of rare operations, one by one
            grads = iter(torch.func.vmap(backward)(seeds))
    except VMAP_REFUSALS as error:
        columns = _in_turn(outputs, uses, seeds, keep, differentiable=False)  # raises if the model is at fault
        log_refusal("columns", error)
        return columns
    return [
        next(grads) if known else outputs.new_zeros((len(seeds), *use.output_shape))
        for use, known in zip(uses, reached, strict=True)
    ]


def _explicit(rows: Tensor, known: Survey) -> list[tuple[Block, Jacobian]]:
    """Split the Jacobians (n, K, size) in all weights without rules into one for each block of weights."""
    parts: list[tuple[Block, Jacobian]] = []
    first = 0
    for place in known.places:
        if place.block.names[0] in known.explicit:
            parts.append((place.block, Explicit(rows[..., first : first + place.block.size])))
            first += place.block.size
    return parts
