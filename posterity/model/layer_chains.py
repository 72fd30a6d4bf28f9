"""Members of chains of layers as batched products and grouped convolutions."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from posterity.model.batch import Inputs
from posterity.networks.convolutional import ResidualBlock
from posterity.networks.layers import Erf, Scaled

# Layers that act on each number by itself, so that axes in front of the rows change nothing.
ENTRYWISE = (
    *(nn.ReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU, nn.ELU, nn.SELU, nn.LeakyReLU, nn.Softplus, nn.Identity),
    *(nn.Hardtanh, nn.ReLU6, nn.LogSigmoid, nn.Mish),
    *(Erf, Scaled),
)


@dataclass(frozen=True)
class LinearChain:
    """Linear layers and activations one after the other.

    `vmap` runs any module, but takes as long to send one operation on its way as a small layer takes to run, and the
    gradients of its products do not lie in memory as the activations do.
    """

    layers: tuple[nn.Module, ...]

    def takes(self, inputs: Inputs, per_member: bool) -> bool:
        """Whether the first layer takes such rows; an error of the module itself says best why not."""
        first = self.layers[0]
        if not isinstance(first, nn.Linear) or not isinstance(inputs, Tensor):
            return False
        return inputs.dim() == (3 if per_member else 2) and inputs.shape[-1] == first.in_features

    def laid_out(self, inputs: Inputs) -> Inputs:
        """Inputs of one network: rows are well as they are."""
        return inputs

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
            elif inputs.stride(0) == 0 and len(inputs) > 1:  # all see the same rows: one large product serves them
                flat, rows = weight.reshape(-1, weight.shape[-1]), inputs[0].T
                column = None if bias is None else bias.expand(weight.shape[:2]).reshape(-1, 1)
                product = flat @ rows if column is None else torch.addmm(column, flat, rows)
                inputs = product.view(*weight.shape[:2], -1).mT
            # Here as above the weights come first: so their gradients are made as they lie in theta, and those of the
            # activations as these do; where the two differ every operation on both walks through memory in leaps.
            elif bias is None:
                inputs = torch.bmm(weight, inputs.mT).mT
            else:
                inputs = torch.baddbmm(bias.unsqueeze(-1), weight, inputs.mT).mT
        return inputs


def linear_chain(module: nn.Module) -> LinearChain | None:
    """The chain of a module that is nothing but linear layers and activations one after the other, else None.

    >>> linear_chain(nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))).layers
    (Linear(in_features=2, out_features=3, bias=True), Tanh(), Linear(in_features=3, out_features=1, bias=True))
    >>> linear_chain(nn.Sequential(nn.Conv2d(1, 1, 1), nn.ReLU())) is None
    True
    """
    layers = plain_layers(module, (nn.Linear,))
    # A first layer that works in place would write into rows that the members share.
    return LinearChain(layers) if layers and isinstance(layers[0], nn.Linear) else None


def plain_layers(module: nn.Module, kinds: tuple[type[nn.Module], ...]) -> tuple[nn.Module, ...] | None:
    """The layers of a module that calls one after the other, all of these kinds or entrywise; None for another one."""
    if _hooked(module):
        return None
    if type(module) in (*kinds, *ENTRYWISE):
        return (module,)
    if not isinstance(module, nn.Sequential) or type(module).forward is not nn.Sequential.forward:
        return None
    parts = [plain_layers(part, kinds) for part in module]
    return None if None in parts else tuple(layer for part in parts if part is not None for layer in part)


def _hooked(module: nn.Module) -> bool:
    """Whether a call of the module does more than its `forward`."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks) or "forward" in vars(module)


_POOLS = (nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d)


@dataclass(frozen=True)
class ImageChain:
    """Layers that work on images (n, C, H, W), flattened at the end, and linear layers and activations after that.

    `vmap` runs convolutions of members as grouped ones as well, but moves the member axis about between layers; here
    the images of all members are the channels (n, M C, H, W) of one from the first layer to the last. On a GPU channels
    come last in memory, as its fast kernels have them, for members and for one network alike.
    """

    images: tuple[nn.Module, ...]
    rest: LinearChain

    def takes(self, inputs: Inputs, per_member: bool) -> bool:
        """Whether the first convolution takes such images; an error of the module itself says best why not."""
        first = self.images[0]
        if not isinstance(first, nn.Conv2d) or not isinstance(inputs, Tensor):
            return False
        return inputs.dim() == (5 if per_member else 4) and inputs.shape[-3] == first.in_channels

    def laid_out(self, inputs: Inputs) -> Inputs:
        """Inputs of one network, as its layers like them best in memory."""
        return _laid_out(inputs) if isinstance(inputs, Tensor) and inputs.dim() == 4 else inputs

    def run(self, inputs: Tensor, count: int, per_member: bool) -> Tensor:
        """Outputs (M, n, K) of images (n, C, H, W) or (M, n, C, H, W); weights have a leading axis M or are shared."""
        images = inputs.transpose(0, 1).flatten(1, 2) if per_member else inputs  # (n, M C, H, W) or (n, C, H, W)
        images = _Members(count, not per_member).through(self.images, _laid_out(images))
        rows = images.reshape(len(images), count, -1).transpose(0, 1)  # (M, n, C H W)
        return self.rest.through(rows)


def image_chain(module: nn.Module) -> ImageChain | None:
    """The chain of a module that is nothing but convolutions, batch norm, activations and pooling, then linear layers.

    >>> found = image_chain(nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3)))
    >>> len(found.images), len(found.rest.layers)
    (2, 1)
    >>> image_chain(nn.Sequential(nn.Conv2d(1, 2, 3, padding_mode="circular"), nn.Flatten())) is None
    True
    """
    layers = plain_layers(module, (nn.Conv2d, nn.BatchNorm2d, nn.Flatten, nn.Linear, ResidualBlock, *_POOLS))
    places = [place for place, layer in enumerate(layers or ()) if type(layer) is nn.Flatten]
    if layers is None or len(places) != 1 or type(layers[0]) is not nn.Conv2d:
        return None
    flatten, images, rest = layers[places[0]], layers[: places[0]], layers[places[0] + 1 :]
    assert isinstance(flatten, nn.Flatten)
    if (flatten.start_dim, flatten.end_dim) != (1, -1) or not all(_taken(layer) for layer in images):
        return None
    if not all(type(layer) in (nn.Linear, *ENTRYWISE) for layer in rest):
        return None
    return ImageChain(images, LinearChain(rest))


def _taken(layer: nn.Module) -> bool:
    """Whether it is a layer on images of a kind for which grouping channels is the same as running members."""
    if isinstance(layer, nn.Conv2d):
        return layer.groups == 1 and layer.padding_mode == "zeros"
    if isinstance(layer, nn.BatchNorm2d):
        return layer.momentum is not None
    if isinstance(layer, nn.MaxPool2d):
        return not layer.return_indices
    if isinstance(layer, ResidualBlock):
        return plain_layers(nn.Sequential(*layer.children()), (nn.Conv2d, nn.BatchNorm2d)) is not None
    return not isinstance(layer, nn.Linear)


def _laid_out(images: Tensor) -> Tensor:
    return images.contiguous(memory_format=torch.channels_last) if images.is_cuda else images


@dataclass
class _Members:
    """The layers with the images of `count` members as channels, (n, M C, H, W); `shared` while these are the same."""

    count: int
    shared: bool

    def through(self, layers: tuple[nn.Module, ...], images: Tensor) -> Tensor:
        for layer in layers:
            images = self._step(layer)(images)
        return images

    def _step(self, layer: nn.Module) -> Callable[[Tensor], Tensor]:
        if isinstance(layer, nn.Conv2d):
            return lambda images: self._convolved(layer, images)
        if isinstance(layer, nn.BatchNorm2d):
            return lambda images: self._normalised(layer, images)
        if isinstance(layer, ResidualBlock):
            return lambda images: self._residual(layer, images)
        return layer

    def _joined(self, value: Tensor | None, axes: int) -> Tensor | None:
        """A weight (M, O, ...), or one (O, ...) that members share, as (M O, ...); `axes`: how many one member has."""
        if value is None:
            return None
        return (value if value.dim() > axes else value.expand(self.count, *value.shape)).flatten(0, 1)

    def _convolved(self, layer: nn.Conv2d, images: Tensor) -> Tensor:
        weight, bias = self._joined(layer.weight, 4), self._joined(layer.bias, 1)
        assert weight is not None
        groups = 1 if self.shared else self.count  # images that all share are convolved with all kernels
        self.shared = False
        return F.conv2d(images, weight, bias, layer.stride, layer.padding, layer.dilation, groups)

    def _normalised(self, layer: nn.BatchNorm2d, images: Tensor) -> Tensor:
        scale, shift = self._joined(layer.weight, 1), self._joined(layer.bias, 1)
        mean, variance = self._joined(layer.running_mean, 1), self._joined(layer.running_var, 1)
        if layer.training and layer.num_batches_tracked is not None:
            layer.num_batches_tracked.add_(1)
        training = layer.training or mean is None
        return F.batch_norm(images, mean, variance, scale, shift, training, layer.momentum or 0.0, layer.eps)

    def _residual(self, layer: ResidualBlock, images: Tensor) -> Tensor:
        change = F.relu(self._normalised(layer.norm1, self._convolved(layer.conv1, images)))
        change = self._normalised(layer.norm2, self._convolved(layer.conv2, change))
        if layer.stride > 1 or layer.missing:
            each = images[:, :, :: layer.stride, :: layer.stride]
            each = each.reshape(len(each), self.count, -1, *each.shape[2:])  # (n, M, C, H, W)
            images = _laid_out(layer.padded(each).flatten(1, 2))
        return F.relu(images + change)
