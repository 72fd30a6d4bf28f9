"""One hidden layer in the mean-field scaling."""

import torch
from torch import nn

from posterity.errors import positive_whole, unknown
from posterity.networks.layers import Chain, Erf, Scaled
from posterity.networks.mlp import ACTIVATIONS

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
        layers = [
            nn.Linear(inputs, width, bias=False),
            MEAN_FIELD_ACTIVATIONS[activation](),
            nn.Linear(width, outputs, bias=False),
            Scaled(1.0 / width),
        ]
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
        with torch.no_grad():
            nn.init.uniform_(
                self[2].weight, -1.0, 1.0
            )  # torch's own bound, 1 / sqrt(N), would make neurons depend on N
