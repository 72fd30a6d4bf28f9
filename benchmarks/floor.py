"""Multiply-adds that the passes over the data cannot do without, counted from the shapes of the layers.

A layer maps K inputs to M outputs at T positions (T = 1 for a linear layer; for a convolution K counts a patch and
T the pixels of its output); for one row:

- forward T K M; gradient of the weights T K M; gradient of its inputs T K M, which the first layer does not need.
- Kronecker factors, of symmetric products the upper half alone: inputs T K'(K' + 1) / 2, where K' = K + 1 with a
  bias, once a row; outputs T M (M + 1) / 2 for each column.
- diagonal: sum_c (sum_t g_tc a_t^T)^2. For T = 1 it is (sum_c g_c^2) (a^2)^T, K M in all, as squares factor; for
  T > 1 the gradient of each row and column is formed and squared: (T + 1) K M a column.

A column is one vector sent back through all layers but the first: the softmax of C classes has an output Hessian of
rank C - 1, so that an exact Gauss-Newton matrix takes C - 1 columns; a sample of the Fisher takes one, and so does the
empirical Fisher. Left out, as small beside these: activations, norms, pooling, biases, the columns themselves. Left
out too: the decomposition of the factors, once a fit, which does not grow with the data.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """A linear map of `inputs` (K) to `outputs` (M) at `positions` (T), with or without a bias."""

    inputs: int
    outputs: int
    positions: int = 1
    bias: bool = True

    @property
    def product(self) -> int:
        """T K M: one pass through the layer, either way."""
        return self.positions * self.inputs * self.outputs

    @property
    def input_factor(self) -> int:
        """Upper half of the sum of a a^T over positions."""
        return self.positions * _half(self.inputs + self.bias)

    @property
    def output_factor(self) -> int:
        """Upper half of the sum of g g^T over positions, for one column."""
        return self.positions * _half(self.outputs)

    def squares(self, columns: int) -> int:
        """The sum over columns of the squared gradients of the weights."""
        if self.positions == 1:
            return self.product
        return columns * (self.product + self.inputs * self.outputs)


def _half(size: int) -> int:
    return size * (size + 1) // 2


def shapes(module: nn.Module, row: Tensor) -> list[Shape]:
    """The linear and convolution layers of `module` in the order in which one `row`, (1, ...), runs through them."""
    found: list[Shape] = []

    def note(layer: nn.Module, _: tuple[Tensor, ...], out: Tensor) -> None:
        if isinstance(layer, nn.Conv2d):
            if layer.groups > 1:
                raise ValueError(f"floor.shapes counts convolutions of one group. Got {layer.groups} groups.")
            found.append(Shape(layer.weight[0].numel(), layer.out_channels, out[0, 0].numel(), layer.bias is not None))
        elif isinstance(layer, nn.Linear):
            found.append(Shape(layer.in_features, layer.out_features, 1, layer.bias is not None))

    hooks = [layer.register_forward_hook(note) for layer in module.modules()]
    try:
        with torch.no_grad():
            module(row)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def forward(layers: Sequence[Shape]) -> int:
    """One forward pass of a row."""
    return sum(layer.product for layer in layers)


def column(layers: Sequence[Shape]) -> int:
    """One vector sent back from the outputs to the outputs of the first layer."""
    return sum(layer.product for layer in layers[1:])


def epoch(layers: Sequence[Shape]) -> int:
    """Forward and backward: the limit."""
    return forward(layers) + column(layers) + sum(layer.product for layer in layers)


def kronecker(layers: Sequence[Shape], columns: int) -> int:
    """Both factors of every layer."""
    factors = sum(layer.input_factor + columns * layer.output_factor for layer in layers)
    return forward(layers) + columns * column(layers) + factors


def diagonal(layers: Sequence[Shape], columns: int) -> int:
    """The squared gradients of every weight."""
    return forward(layers) + columns * column(layers) + sum(layer.squares(columns) for layer in layers)


def last_layer_kronecker(layers: Sequence[Shape]) -> int:
    """Both factors of the last layer, whose output factor is the sum of the output Hessians: no column is sent back."""
    return forward(layers) + layers[-1].input_factor + layers[-1].output_factor
