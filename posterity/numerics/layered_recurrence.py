"""A recurrent network of several layers as one layer after the other, so that something may happen between them."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


@contextmanager
def scattered_weights() -> Iterator[None]:
    """Where recurrent layers run with weights of another place than their own: without cuDNN's warning about that.

    It asks for `flatten_parameters`, which can do nothing for parts of theta or for a layer by itself: cuDNN wants one
    piece of memory in an order of its own, and makes it in every call.

    >>> with scattered_weights():
    ...     warnings.warn("RNN module weights are not part of single contiguous chunk of memory.")
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="RNN module weights are not part of single contiguous chunk")
        yield


def by_layers(
    func: Callable[..., Any],
    between: Callable[[Tensor, float], Tensor],
    input: Tensor,
    hidden: Any,
    weights: Any,
    biases: Any,
    layers: Any,
    rate: Any,
    train: Any,
    bidirectional: Any,
    batch_first: Any = False,
) -> Any:
    """`func` (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu) with `between(output, rate)` after each layer.

    The other arguments are those of `func`. The last layer's output stays as it is. Packed sequences with a rate
    above 0 are refused, since the rows of their data cannot be told apart.
    """
    if not isinstance(biases, bool):  # data, batch sizes, hidden, weights, biases, layers, rate, train, bidirectional
        packed_rate = train
        if packed_rate:
            raise ValueError(
                "Dropout between the layers of a recurrent network needs a tensor. Got a packed sequence. Pad it, or "
                "make the layer with dropout=0."
            )
        return func(input, hidden, weights, biases, layers, rate, train, bidirectional, batch_first)
    if not rate:
        return func(input, hidden, weights, biases, layers, 0.0, train, bidirectional, batch_first)
    each, directions = len(weights) // layers, 2 if bidirectional else 1
    states: list[Any] = []
    for layer in range(layers):
        own = slice(layer * directions, (layer + 1) * directions)
        first = tuple(h[own] for h in hidden) if isinstance(hidden, (tuple, list)) else hidden[own]
        some = list(weights[layer * each : (layer + 1) * each])
        with scattered_weights():
            output, *state = func(input, first, some, biases, 1, 0.0, train, bidirectional, batch_first)
        states.append(state)
        input = output if layer == layers - 1 else between(output, rate)
    return (input, *_joined(states))


def _joined(states: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """The last states of all layers behind each other."""
    return [torch.cat(list(parts)) for parts in zip(*states, strict=True)]
