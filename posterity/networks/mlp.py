"""Fully connected networks: MLP, and one hidden layer in the mean-field scaling."""

from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from posterity.errors import positive_whole, shown, unknown
from posterity.networks.layers import Chain, Erf, Scaled

ACTIVATIONS: dict[str, type[nn.Module]] = dict(
    relu=nn.ReLU, tanh=nn.Tanh, sigmoid=nn.Sigmoid, gelu=nn.GELU, silu=nn.SiLU
)


class MLP(Chain):
    """Linear layers of the given `sizes`, inputs first and outputs last, with an activation between them.

    Takes (N, sizes[0]) and gives (N, sizes[-1]). Layers and activations are numbered in order, so the
    parameters are called `0.weight`, `0.bias`, `2.weight`, ... With a `dropout` rate above 0, `nn.Dropout` follows
    each activation and is numbered, too; it drops under `MCDropout` alone.

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


MEAN_FIELD_ACTIVATIONS: dict[str, type[nn.Module]] = {**ACTIVATIONS, "erf": Erf}


class MeanFieldNetwork(Chain):
    """The average of `width` neurons: f(x) = (1/N) sum over j of a_j sigma(<b_j, x>), without biases.

    Takes (rows, inputs) and gives (rows, outputs). The b_j are the rows of `0.weight` (width, inputs), the a_j the
    columns of `2.weight` (outputs, width). The 1/N is part of the model: f depends on the weights only through the
    distribution of the neurons, which is what `posterity.theory` is about. All neurons start from one
    distribution, whatever the width: a_j uniform on [-1, 1], and b_j as torch starts a linear layer.

    >>> net = MeanFieldNetwork(inputs=2, width=50)
    >>> [(name, tuple(weight.shape)) for name, weight in net.named_parameters()]
    [('0.weight', (50, 2)), ('2.weight', (1, 50))]
    >>> net.config
    {'inputs': 2, 'width': 50, 'outputs': 1, 'activation': 'relu'}
    """

    def __init__(self, inputs: int, width: int, outputs: int = 1, activation: str = "relu") -> None:
        for name, value in (("inputs", inputs), ("width", width), ("outputs", outputs)):
            positive_whole(f"MeanFieldNetwork.{name}", value)
        if activation not in MEAN_FIELD_ACTIVATIONS:
            raise ValueError(unknown("activation", str(activation), MEAN_FIELD_ACTIVATIONS))
        inner, outer = nn.Linear(inputs, width, bias=False), nn.Linear(width, outputs, bias=False)
        layers = [inner, MEAN_FIELD_ACTIVATIONS[activation](), outer, Scaled(1.0 / width)]
        super().__init__(layers, {"inputs": inputs, "width": width, "outputs": outputs, "activation": activation})
        self._start_outer()

    @property
    def width(self) -> int:
        """Number of neurons N."""
        return int(self.config["width"])

    def reset_parameters(self) -> None:
        """Draw all neurons anew, from torch's global generator."""
        self[0].reset_parameters()
        self._start_outer()

    def _start_outer(self) -> None:
        # torch's own bound, 1 / sqrt(N), would make neurons depend on N
        nn.init.uniform_(self[2].weight, -1.0, 1.0)
