"""Dropout whose rate is learnt."""

import math

import torch
from torch import Tensor, nn

from posterity.errors import shown
from posterity.numerics.dropout import concrete_dropout

LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


class ConcreteDropout(nn.Module):
    """A linear layer or convolution behind dropout at a rate of its own, which `methods.MCDropout` learns.

    **Math**: layer(x keep / (1 - p)) with p = sigmoid(`rate_logit`). Training draws keep = sigmoid((logit u -
    logit p) / t), u uniform, at the temperature t of `MCDropout`: a coin with a gradient in p. What pulls p is the
    entropy K H(p) of the K units that are dropped, against the data and the weights' prior: see `MCDropout`.
    Predictions draw coins. Convolutions drop whole channels.

    **Limit**: the relaxation is biased, by less the smaller t is. Under every other method nothing is dropped.

    **Cost**: one random number for each input, and one parameter.

    **References**: Gal, Hron and Kendall (2017), Concrete dropout, eq. 2-5.

    **Example**:

    >>> net = nn.Sequential(nn.Linear(2, 50), nn.ReLU(), ConcreteDropout(nn.Linear(50, 1), rate=0.2))
    >>> round(net[2].rate.item(), 4), [name for name, _ in net.named_parameters()][2:]
    (0.2, ['2.rate_logit', '2.layer.weight', '2.layer.bias'])
    """

    def __init__(self, layer: nn.Module, rate: float = 0.1) -> None:
        """Take the layer, and the rate to begin from."""
        super().__init__()
        if not isinstance(layer, LAYERS) or getattr(layer, "groups", 1) != 1:
            raise TypeError(
                f"ConcreteDropout.layer must be a Linear layer or a convolution without groups. Got {shown(layer)}."
            )
        if not isinstance(rate, (int, float)) or isinstance(rate, bool) or not 0 < rate < 1:
            raise ValueError(f"ConcreteDropout.rate must be above 0 and below 1. Got {shown(rate)}.")
        self._start = math.log(rate) - math.log1p(-rate)
        self.rate_logit = nn.Parameter(torch.empty((), dtype=layer.weight.dtype, device=layer.weight.device))
        self.layer = layer
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Back to the rate that it was made with."""
        with torch.no_grad():
            self.rate_logit.fill_(self._start)

    @property
    def rate(self) -> Tensor:
        """The probability with which a unit is dropped, ()."""
        return torch.sigmoid(self.rate_logit)

    def forward(self, x: Tensor) -> Tensor:
        """The layer's outputs."""
        channels = -1 if isinstance(self.layer, nn.Linear) else 1
        outputs: Tensor = self.layer(concrete_dropout(x, self.rate, channels))
        return outputs
