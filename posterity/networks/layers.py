"""Small layers: entrywise functions, chains, concrete dropout."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from posterity.errors import shown
from posterity.numerics.dropout import concrete_dropout


class Chain(nn.Sequential):
    """Base of the networks here: takes the layers and the constructor's arguments, and keeps both.

    Weights start as torch starts them, from torch's global generator: call `torch.manual_seed` first.
    """

    def __init__(self, layers: Sequence[nn.Module], config: Mapping[str, Any]) -> None:
        super().__init__(*layers)
        self._config = dict(config)

    @property
    def config(self) -> dict[str, Any]:
        """The constructor's arguments as plain values: `type(net)(**net.config)` has the same architecture."""
        return {name: list(value) if isinstance(value, list) else value for name, value in self._config.items()}

    def __getitem__(self, index: slice | int) -> Any:
        """One layer, or for a slice the `nn.Sequential` of those layers."""
        # nn.Sequential would call this class's constructor with the sliced layers.
        return nn.Sequential(*list(self)[index]) if isinstance(index, slice) else super().__getitem__(index)


class Erf(nn.Module):
    """The error function as an activation: odd, bounded, with Gaussian expectations in closed form.

    >>> Erf()(torch.tensor([0.0, 1.0]))
    tensor([0.0000, 0.8427])
    """

    def forward(self, x: Tensor) -> Tensor:
        return torch.erf(x)


class Scaled(nn.Module):
    """Multiplication by a fixed `factor`.

    >>> Scaled(0.5)(torch.tensor([3.0]))
    tensor([1.5000])
    """

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * x

    def extra_repr(self) -> str:
        return f"factor={self.factor}"


LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


class ConcreteDropout(nn.Module):
    """A linear layer or convolution behind dropout at its own `rate`, which `methods.MCDropout` learns.

    **Math**: layer(x keep / (1 - p)) with p = sigmoid(`rate_logit`). Training and predictions draw coins. The entropy
    K H(p) of the K units pulls p against the data and the weights' prior: see `MCDropout`, which estimates the gradient
    in p without bias. Given a temperature t, it trains with keep = sigmoid((logit u - logit p) / t), u uniform: a
    relaxed coin with a gradient in p. Convolutions drop whole channels.

    **Limit**: relaxed coins are biased, and their gradients vary more the smaller t is. Under every other method
    nothing is dropped.

    **Cost**: one random number for each input, and one parameter.

    **References**: Gal, Hron and Kendall (2017), Concrete dropout, eq. 2-5.

    **Example**:

    >>> net = nn.Sequential(nn.Linear(2, 50), nn.ReLU(), ConcreteDropout(nn.Linear(50, 1), rate=0.2))
    >>> round(net[2].rate.item(), 4), [name for name, _ in net.named_parameters()][2:]
    (0.2, ['2.rate_logit', '2.layer.weight', '2.layer.bias'])
    """

    def __init__(self, layer: nn.Module, rate: float = 0.1) -> None:
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
        """Restore the rate given at construction."""
        with torch.no_grad():
            self.rate_logit.fill_(self._start)

    @property
    def rate(self) -> Tensor:
        """The probability with which a unit is dropped, ()."""
        return torch.sigmoid(self.rate_logit)

    def forward(self, x: Tensor) -> Tensor:
        channels = -1 if isinstance(self.layer, nn.Linear) else 1
        outputs: Tensor = self.layer(concrete_dropout(x, self.rate, channels))
        return outputs
