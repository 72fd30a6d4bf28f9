"""The work of passes through a network: multiply-adds and bytes of a step, counted on a few rows."""

from dataclasses import replace
from math import prod

import torch
from torch import Tensor

from posterity.curvature import Curvature, Structure
from posterity.curvature.survey import survey
from posterity.inference.memory import activation_bytes, first_rows
from posterity.inference.method import Work, theta_bytes
from posterity.model import Data, Joint, Problem


def row_products(joint: Problem, data: Data) -> tuple[int, int]:
    """Return the multiply-adds of a row forward and backward, of products and convolutions alone.

    They are what the network runs on three rows beyond what it runs on two; of a `Density` they are not known, (0, 0).
    Backward goes to the weights, and to the inputs of all layers but the first.
    """
    from torch.utils.flop_counter import FlopCounterMode

    if joint.network is None:
        return 0, 0
    network = joint.network.member(0)
    counts: list[tuple[int, int]] = []
    for rows in (2, 3):
        inputs = first_rows(data, rows, joint.device)
        leaves = [view.detach().requires_grad_() for view in network.views(network.initial)]
        forward, backward = FlopCounterMode(display=False), FlopCounterMode(display=False)
        with torch.enable_grad(), network.without_dropout(inputs):
            with forward:
                outputs: Tensor = network.run(leaves, inputs, train=True)[0]
            with backward:
                torch.autograd.grad(outputs.sum(), leaves, allow_unused=True)
        counts.append((forward.get_total_flops() // 2, backward.get_total_flops() // 2))
    (forward_two, backward_two), (forward_three, backward_three) = counts
    return forward_three - forward_two, backward_three - backward_two


def gradient_work(
    kind: str, joint: Problem, data: Data, rows: int | None, *, vectors: int, draws: int = 1, summed: int | None = None
) -> Work | None:
    """Return the work of a step that takes `draws` gradients on this many rows (None: all); None for a `Density`.

    A step reads and writes so many `vectors` of the size of theta, and each activation twice. It sums the gradient
    over the devices, or `summed` numbers. `joint` may have members, which step together.
    """
    if joint.network is None:
        return None
    count = min(data.num_data, data.num_data if rows is None else rows)
    products = draws * count * sum(row_products(joint, data))
    moved = vectors * theta_bytes(joint) + 4 * draws * activation_bytes(joint, data, rows)
    members = joint.num_members or 1
    numbers = members * (joint.size if summed is None else summed)
    return Work(kind, members * products, moved, numbers, joint.dtype.itemsize)


def leapfrog_work(joint: Problem, data: Data, chains: int, leapfrogs: int | None) -> Work | None:
    """Return the work of so many leapfrogs (None: the run decides) of chains that see all rows."""
    own = gradient_work("leapfrogs", joint, data, None, vectors=12)
    times = chains if joint.num_members is None else 1  # else the joint counts them
    return own and replace(own.times(times), units=leapfrogs, unit="leapfrog")


def curvature_work(
    joint: Joint, data: Data, rows: int | None, curvature: Curvature, structure: Structure, moved: int
) -> Work | None:
    """Return the work of a pass that sums a curvature of all weights in batches of this many rows (None: all).

    A batch is sent forward once and back once for each column, and moves so many bytes.
    """
    known = survey(joint, data.first().member(0).inputs)
    if known.total < joint.num_weights or known.select is not None or joint.num_members is not None:
        return None
    columns = curvature.columns_for(max(1, prod(known.event)), structure.whole(known), joint.num_data)
    added = structure.products(known, data.num_data, columns)
    if added is None or not curvature.factored or structure.passes > 1:
        return None
    forward, backward = row_products(joint, data)
    count = min(data.num_data, data.num_data if rows is None else rows)
    a_row = forward + columns * (backward - forward) + added.a_row  # to the outputs of layers, not to their weights
    kind, batches = f"Laplace, {type(structure).__name__}", -(-data.num_data // count)
    return Work(kind, count * a_row, moved, added.summed, 8, batches, "batch", added.once, summed_once=True)


def row_outputs(joint: Joint, data: Data) -> int:
    """Return the number of outputs of a row."""
    return max(1, prod(survey(joint, data.first().member(0).inputs).event))
