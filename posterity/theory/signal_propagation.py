"""Variance and correlation of two inputs by depth in random networks: drawn, and in the limit of infinite width."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from posterity.errors import positive, positive_whole, shown
from posterity.numerics.random import Key
from posterity.special.activations import activation_function
from posterity.special.quadrature import normal_expectation

_INNER = 600  # nodes for the part of one input alone, an even number: none on a kink at zero
_OUTER = 151  # nodes for the part that both inputs share


class Signals(NamedTuple):
    """Variance and correlation by layer, (depth + 1,) in float64 on the CPU, the inputs first: drawn, and mean-field.

    `variance` is the mean square of a layer's pre-activations, `correlation` the cosine between those of two inputs.
    """

    variance: Tensor
    correlation: Tensor
    mean_field_variance: Tensor
    mean_field_correlation: Tensor


def signal_propagation(
    activation: str | Callable[[Tensor], Tensor],
    weight_variance: float,
    bias_variance: float = 0.0,
    *,
    width: int = 500,
    depth: int = 50,
    variance: float = 1.0,
    correlation: float = 0.5,
    key: Key | None = None,
) -> Signals:
    """Send two inputs of this `variance` and `correlation` through a network of random weights.

    **Math**: h' = W phi(h) + b with W ~ N(0, weight_variance / width), b ~ N(0, bias_variance), beside the recursion of
    infinite width q' = sigma_w^2 E phi(u)^2 + sigma_b^2, c' q' = sigma_w^2 E phi(u) phi(v) + sigma_b^2 for u, v normal
    with variance q and correlation c. Deviations of c from its fixed point grow by chi a layer, so that on the edge of
    chaos (`EdgeOfChaos`), where chi = 1, it converges slower than exponentially. The same holds for q without biases.

    **Limit**: one draw of a network, whose q and c scatter by about 1 / sqrt(width) a layer, and these errors add up
    where chi = 1. The recursion is exact to quadrature, 1e-6 for activations with no kinks but at zero.

    **Cost**: depth products of width^2; 1e5 evaluations of the activation a layer for the recursion.

    **References**: Poole et al. (2016), Exponential expressivity in deep neural networks through transient chaos, eq. 3
    and 5; Schoenholz et al. (2017), Deep information propagation.

    **Example**:

    >>> signals = signal_propagation("relu", 2.0, width=1000, depth=3)
    >>> signals.mean_field_variance
    tensor([1.0000, 1.0000, 1.0000, 1.0000], dtype=torch.float64)
    >>> signals.mean_field_correlation
    tensor([0.5000, 0.6090, 0.6839, 0.7381], dtype=torch.float64)
    """
    function = activation_function(activation)
    positive("signal_propagation: weight_variance", weight_variance)
    positive("signal_propagation: variance", variance)
    positive_whole("signal_propagation: width", width, "of at least 2")
    if width < 2:
        raise ValueError("signal_propagation: width must be at least 2, since two inputs must differ. Got 1.")
    positive_whole("signal_propagation: depth", depth)
    if not bias_variance >= 0.0:
        raise ValueError(f"signal_propagation: bias_variance must be at least 0. Got {shown(bias_variance)}.")
    if not -1.0 <= correlation <= 1.0:
        raise ValueError(f"signal_propagation: correlation must be between -1 and 1. Got {shown(correlation)}.")
    expected = [(variance, correlation)]
    for _ in range(depth):
        expected.append(_next(function, *expected[-1], weight_variance, bias_variance))
    key = key or Key(0)
    first, second = torch.linalg.qr(key.fold("inputs").normal((width, 2), torch.float64, "cpu"))[0].T * math.sqrt(width)
    second = correlation * first + math.sqrt(1.0 - correlation * correlation) * second
    states = math.sqrt(variance) * torch.stack([first, second])  # (2, width)
    drawn = []
    for layer in range(depth + 1):
        if layer:
            weights = key.fold(layer).fold("weights").normal((width, width), torch.float64, "cpu")
            biases = key.fold(layer).fold("biases").normal((width,), torch.float64, "cpu")
            scale = math.sqrt(weight_variance / width)
            with torch.no_grad():
                states = scale * function(states.clone()) @ weights.T + math.sqrt(bias_variance) * biases
        cosine = torch.cosine_similarity(states[0], states[1], dim=0, eps=1e-300)
        drawn.append(torch.stack([states.square().mean(-1).mean(), cosine]))
    recursion = torch.tensor(expected, dtype=torch.float64, device="cpu")
    return Signals(*torch.stack(drawn).unbind(-1), *recursion.unbind(-1))


def _next(
    function: Callable[[Tensor], Tensor], q: float, c: float, weight_variance: float, bias_variance: float
) -> tuple[float, float]:
    """q and c of the next layer.

    Two normals of correlation c are sqrt(|c|) times a shared normal plus independent parts; given the shared one,
    phi(u) and phi(v) are independent. So kinks are met in one dimension only, where nodes crowd around zero.
    """
    if q < torch.finfo(torch.float64).tiny:
        return 0.0, c  # the signal has died out
    zero = torch.zeros((), dtype=torch.float64, device="cpu")
    square = normal_expectation(lambda x: function(x).square(), zero, zero + math.sqrt(q), _INNER, width=0.0)
    own = torch.full((_OUTER,), math.sqrt(q * (1.0 - abs(c))), dtype=torch.float64, device="cpu")

    def product(common: Tensor) -> Tensor:
        shared = (math.sqrt(q * abs(c)) * common).reshape(-1)
        first = normal_expectation(function, shared, own, _INNER, width=0.0)
        return (first * (first if c >= 0.0 else first.flip(0))).reshape(common.shape)

    both = square if abs(1.0 - c) < 1e-15 else normal_expectation(product, zero, zero + 1.0, _OUTER)
    variance = weight_variance * float(square) + bias_variance
    if variance == 0.0:
        return 0.0, c
    return variance, max(-1.0, min(1.0, (weight_variance * float(both) + bias_variance) / variance))
