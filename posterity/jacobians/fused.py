"""Recurrent layers as loops over time, for derivatives in their weights: torch's own kernels hide the steps."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]
Cell = Callable[[Tensor, Tensor, tuple[Tensor, ...]], tuple[Tensor, ...]]
"""The next states from the parts of inputs and of hidden state in the gates, and the states."""


def lstm_cell(inside: Tensor, recurrent: Tensor, states: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """One step of an LSTM, states (h, c)."""
    update, forget, new, out = (inside + recurrent).chunk(4, -1)
    memory = forget.sigmoid() * states[1] + update.sigmoid() * new.tanh()
    return out.sigmoid() * memory.tanh(), memory


def gru_cell(inside: Tensor, recurrent: Tensor, states: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """One step of a GRU, states (h,)."""
    size = states[0].shape[-1]
    reset, update = (inside[..., : 2 * size] + recurrent[..., : 2 * size]).sigmoid().chunk(2, -1)
    new = (inside[..., 2 * size :] + reset * recurrent[..., 2 * size :]).tanh()
    return ((1.0 - update) * new + update * states[0],)


def plain_cell(activation: Callable[[Tensor], Tensor]) -> Cell:
    """One step of a plain recurrent network, states (h,)."""
    return lambda inside, recurrent, states: (activation(inside + recurrent),)


def recurrence(
    cell: Cell,
    linear: Linear,
    inputs: Tensor,
    states: tuple[Tensor, ...],
    weights: Sequence[Tensor],
    has_biases: bool,
    layers: int,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    """(outputs, *last states) of torch.lstm, torch.gru, torch.rnn_tanh or torch.rnn_relu without dropout.

    `states` are (layers directions, N, H) each; `linear` multiplies by a weight. The product with the inputs is one
    for all steps, and the product with the hidden state one for each step.
    """
    directions, time = 1 + bidirectional, 1 if batch_first else 0
    each = len(weights) // (layers * directions)
    last: list[tuple[Tensor, ...]] = []
    for layer in range(layers):
        outputs = []
        for direction in range(directions):
            number = layer * directions + direction
            own = list(weights[number * each : (number + 1) * each])
            bias, recurrent_bias = (own[2], own[3]) if has_biases else (None, None)
            projection = own[-1] if each in (3, 5) else None
            inside = linear(inputs, own[0], bias).unbind(time)
            state = tuple(values[number] for values in states)
            steps = []
            for gates in reversed(inside) if direction else inside:
                state = cell(gates, linear(state[0], own[1], recurrent_bias), state)
                if projection is not None:
                    state = (linear(state[0], projection, None), *state[1:])
                steps.append(state[0])
            outputs.append(torch.stack(steps[::-1] if direction else steps, time))
            last.append(state)
        inputs = outputs[0] if directions == 1 else torch.cat(outputs, -1)
    return (inputs, *(torch.stack(values) for values in zip(*last, strict=True)))
