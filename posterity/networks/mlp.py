"""Fully connected networks."""

from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from posterity.errors import shown, unknown
from posterity.networks.layers import Chain

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
}


class MLP(Chain):
    """Linear layers of the given `sizes`, inputs first and outputs last, with an activation between them.

    Takes (N, sizes[0]) and gives (N, sizes[-1]). Layers and activations are numbered in order, so the
    parameters are called `0.weight`, `0.bias`, `2.weight`, ... With a `dropout` rate above 0, `nn.Dropout` follows
    each activation (and is numbered, too): it is off but under `MCDropout`.

    >>> net = MLP((2, 50, 1), activation="tanh")
    >>> [name for name, _ in net.named_parameters()]
    ['0.weight', '0.bias', '2.weight', '2.bias']
    >>> net.config
    {'sizes': [2, 50, 1], 'activation': 'tanh', 'bias': True, 'dropout': 0.0}
    """

    def __init__(self, sizes: Sequence[int], activation: str = "relu", bias: bool = True, dropout: float = 0.0) -> None:
        sizes = list(sizes)
        if len(sizes) < 2 or not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in sizes):
            raise ValueError(
                f"MLP.sizes must be at least 2 positive whole numbers, from inputs to outputs. Got {shown(sizes)}."
            )
        if activation not in ACTIVATIONS:
            raise ValueError(unknown("activation", str(activation), ACTIVATIONS))
        if not isinstance(dropout, (int, float)) or isinstance(dropout, bool) or not 0 <= dropout < 1:
            raise ValueError(f"MLP.dropout must be a rate of at least 0 and below 1. Got {shown(dropout)}.")
        layers: list[nn.Module] = []
        for before, after in pairwise(sizes):
            if layers:
                layers += [ACTIVATIONS[activation](), *([nn.Dropout(dropout)] if dropout else [])]
            layers.append(nn.Linear(before, after, bias=bias))
        config = {"sizes": sizes, "activation": activation, "bias": bias, "dropout": float(dropout)}
        super().__init__(layers, config)
