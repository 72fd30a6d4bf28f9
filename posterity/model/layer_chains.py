"""Chains of layers whose members run as batched products and grouped convolutions."""

from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from posterity.model.batch import Inputs
from posterity.model.layouts import aligned, channels_last
from posterity.networks.convolutional import ResidualBlock
from posterity.networks.layers import Erf, Scaled

# Entrywise layers, to which further leading axes make no difference.
ENTRYWISE = (
    *(nn.ReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU, nn.ELU, nn.SELU, nn.LeakyReLU, nn.Softplus, nn.Identity),
    *(nn.Hardtanh, nn.ReLU6, nn.LogSigmoid, nn.Mish),
    *(Erf, Scaled),
)


@dataclass(frozen=True)
class LinearChain:
    """A sequence of linear layers and activations.

    `vmap` runs any module, but its overhead per operation equals the time of a small layer, and the gradients of its
    products have another memory layout than the activations.
    """

    layers: tuple[nn.Module, ...]

    def takes(self, inputs: Inputs, per_member: bool) -> bool:
        """Whether the first layer takes such rows; if not, the module itself raises the clearest error."""
        first = self.layers[0]
        if not isinstance(first, nn.Linear) or not isinstance(inputs, Tensor):
            return False
        return inputs.dim() == (3 if per_member else 2) and inputs.shape[-1] == first.in_features

    def run(self, inputs: Tensor, count: int, per_member: bool) -> Tensor:
        """Outputs (M, n, C) of rows (n, D) or (M, n, D); weights of the layers have a leading axis M or are shared."""
        return self.through(inputs if per_member else inputs.expand(count, *inputs.shape))

    def through(self, inputs: Tensor) -> Tensor:
        """Outputs (M, n, C) of (M, n, D)."""
        for layer in self.layers:
            if not isinstance(layer, nn.Linear):
                inputs = layer(inputs)
                continue
            weight: Tensor = layer.weight
            bias: Tensor | None = layer.bias
            if weight.dim() == 2:
                inputs = F.linear(inputs, weight)
                inputs = inputs if bias is None else inputs + bias.reshape(-1, 1, bias.shape[-1])
            elif inputs.stride(0) == 0 and len(inputs) > 1:  # shared rows: one large product for all members
                flat, rows = weight.reshape(-1, weight.shape[-1]), inputs[0].T
                column = None if bias is None else bias.expand(weight.shape[:2]).reshape(-1, 1)
                product = flat @ rows if column is None else torch.addmm(column, flat, rows)
                inputs = product.view(*weight.shape[:2], -1).mT
            # Here as above the weights come first, so that gradients of weights have the memory layout of theta, and
            # gradients of activations that of the activations; operations on unequal layouts are slow.
            elif bias is None:
                inputs = torch.bmm(weight, inputs.mT).mT
            else:
                inputs = torch.baddbmm(bias.unsqueeze(-1), weight, inputs.mT).mT
        return inputs


def linear_chain(module: nn.Module) -> LinearChain | None:
    """The chain of a module that is a sequence of linear layers and activations, else None.

    >>> linear_chain(nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))).layers
    (Linear(in_features=2, out_features=3, bias=True), Tanh(), Linear(in_features=3, out_features=1, bias=True))
    >>> linear_chain(nn.Sequential(nn.Conv2d(1, 1, 1), nn.ReLU())) is None
    True
    """
    layers = plain_layers(module, (nn.Linear,))
    # A first layer that works in place would write into rows shared by the members.
    return LinearChain(layers) if layers and isinstance(layers[0], nn.Linear) else None


def plain_layers(module: nn.Module, kinds: tuple[type[nn.Module], ...]) -> tuple[nn.Module, ...] | None:
    """The layers of a sequential module, all of these kinds or entrywise; None for any other module."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    if any(hooks) or "forward" in vars(module):  # a call does more than the `forward` of the class
        return None
    if type(module) in (*kinds, *ENTRYWISE):
        return (module,)
    if not isinstance(module, nn.Sequential) or type(module).forward is not nn.Sequential.forward:
        return None
    parts = [plain_layers(part, kinds) for part in module]
    return None if None in parts else tuple(layer for part in parts if part is not None for layer in part)


_POOLS = (nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d)

_Weight = TypeVar("_Weight", Tensor, Tensor | None)

WIDE = 128  # channels; see `ImageChain.wide`


@dataclass(frozen=True)
class ImageChain:
    """Layers on images (n, C, H, W), a flattening, and a chain of linear layers and activations.

    `vmap` also groups the convolutions of members, but moves the member axis between layers; here the members are
    channels (n, M C, H, W) from the first layer to the last. On a GPU channels are last in memory, as its fast kernels
    prefer, for members and for a single network alike.
    """

    images: tuple[nn.Module, ...]
    rest: LinearChain

    def takes(self, inputs: Inputs, per_member: bool) -> bool:
        """Whether the first convolution takes such images; if not, the module itself raises the clearest error."""
        first = self.images[0]
        if not isinstance(first, nn.Conv2d) or not isinstance(inputs, Tensor):
            return False
        return inputs.dim() == (5 if per_member else 4) and inputs.shape[-3] == first.in_channels

    @cached_property
    def wide(self) -> bool:
        """Whether kernels are so wide that a GPU is faster with members one by one than with grouped convolutions."""
        kernels = [part for layer in self.images for part in layer.modules() if isinstance(part, nn.Conv2d)]
        return median(min(kernel.in_channels, kernel.out_channels) for kernel in kernels) >= WIDE

    def run(self, inputs: Tensor, count: int, per_member: bool) -> Tensor:
        """Outputs (M, n, K) of images (n, C, H, W) or (M, n, C, H, W); weights have a leading axis M or are shared."""
        images = inputs.transpose(0, 1).flatten(1, 2) if per_member else inputs  # (n, M C, H, W) or (n, C, H, W)
        images = _Members(count, not per_member).through(self.images, channels_last(images))
        rows = images.reshape(len(images), count, -1).transpose(0, 1)  # (M, n, C H W)
        return self.rest.through(rows)


def image_chain(module: nn.Module) -> ImageChain | None:
    """The chain of a module of convolutions, batch norm, activations and pooling, then linear layers, else None.

    >>> chain = image_chain(nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3)))
    >>> len(chain.images), len(chain.rest.layers)
    (2, 1)
    >>> image_chain(nn.Sequential(nn.Conv2d(1, 2, 3, padding_mode="circular"), nn.Flatten())) is None
    True
    """
    layers = plain_layers(module, (nn.Conv2d, nn.BatchNorm2d, nn.Flatten, nn.Linear, ResidualBlock, *_POOLS))
    indices = [index for index, layer in enumerate(layers or ()) if type(layer) is nn.Flatten]
    if layers is None or len(indices) != 1 or type(layers[0]) is not nn.Conv2d:
        return None
    flatten, images, rest = layers[indices[0]], layers[: indices[0]], layers[indices[0] + 1 :]
    assert isinstance(flatten, nn.Flatten)
    plain = all(map(_groupable, images)) and all(type(layer) in (nn.Linear, *ENTRYWISE) for layer in rest)
    return ImageChain(images, LinearChain(rest)) if plain and (flatten.start_dim, flatten.end_dim) == (1, -1) else None


def _groupable(layer: nn.Module) -> bool:
    """Whether a layer on images can run members as groups of channels."""
    if isinstance(layer, nn.Conv2d):
        return layer.groups == 1 and layer.padding_mode == "zeros"
    if isinstance(layer, nn.BatchNorm2d):
        return layer.momentum is not None
    if isinstance(layer, nn.MaxPool2d):
        return not layer.return_indices
    if isinstance(layer, ResidualBlock):
        return plain_layers(nn.Sequential(*layer.children()), (nn.Conv2d, nn.BatchNorm2d)) is not None
    return not isinstance(layer, nn.Linear)


@dataclass
class _Members:
    """Runs layers on images with `count` members as channels (n, M C, H, W), or (n, C, H, W) while `shared`."""

    count: int
    shared: bool

    def through(self, layers: tuple[nn.Module, ...], images: Tensor) -> Tensor:
        for layer in layers:
            if isinstance(layer, nn.Conv2d):
                images = self._convolved(layer, images)
            elif isinstance(layer, nn.BatchNorm2d):
                images = self._normalised(layer, images)
            else:
                images = self._residual(layer, images) if isinstance(layer, ResidualBlock) else layer(images)
        return images

    def _joined(self, value: Tensor | None, axes: int) -> Tensor | None:
        """A weight (M, O, ...) or a shared weight (O, ...), with `axes` axes, as (M O, ...)."""
        if value is None:
            return None
        return (value if value.dim() > axes else value.expand(self.count, *value.shape)).flatten(0, 1)

    def _convolved(self, layer: nn.Conv2d, images: Tensor) -> Tensor:
        weight, bias = self._joined(layer.weight, 4), self._joined(layer.bias, 1)
        assert weight is not None
        groups = 1 if self.shared else self.count  # shared images are convolved with all kernels
        self.shared = False
        return F.conv2d(images, weight, bias, layer.stride, layer.padding, layer.dilation, groups)

    def _normalised(self, layer: nn.BatchNorm2d, images: Tensor) -> Tensor:
        scale, shift = aligned(self._joined(layer.weight, 1)), aligned(self._joined(layer.bias, 1))
        mean, variance = self._joined(layer.running_mean, 1), self._joined(layer.running_var, 1)
        if layer.training and layer.num_batches_tracked is not None:
            layer.num_batches_tracked.add_(1)
        training = layer.training or mean is None
        return F.batch_norm(images, mean, variance, scale, shift, training, layer.momentum or 0.0, layer.eps)

    def _residual(self, layer: ResidualBlock, images: Tensor) -> Tensor:
        change = F.relu(self._normalised(layer.norm1, self._convolved(layer.conv1, images)))
        change = self._normalised(layer.norm2, self._convolved(layer.conv2, change))
        if layer.stride > 1 or layer.missing:
            strided = images[:, :, :: layer.stride, :: layer.stride]
            strided = strided.reshape(len(strided), self.count, -1, *strided.shape[2:])  # (n, M, C, H, W)
            images = channels_last(layer.padded(strided).flatten(1, 2))
        return F.relu(images + change)
