"""Convolutional networks: ConvNet, LeNet, VGG, ResNet."""

from collections.abc import Mapping

from torch import Tensor, nn
from torch.nn import functional as F

from posterity.errors import positive_whole, shown
from posterity.networks.layers import Chain


def _check(network: nn.Module, config: Mapping[str, object]) -> None:
    """Require positive whole numbers of channels and classes, and a bool `batch_norm`."""
    owner = type(network).__name__
    for name in ("num_classes", "in_channels", "width"):
        positive_whole(f"{owner}.{name}", config[name])
    if not isinstance(config["batch_norm"], bool):
        raise ValueError(f"{owner}.batch_norm must be True or False. Got {shown(config['batch_norm'])}.")


def _convolutions(before: int, after: int, count: int, batch_norm: bool) -> list[nn.Module]:
    """3x3 convolutions with rectifiers, the first from `before` to `after` channels."""
    layers: list[nn.Module] = []
    for index in range(count):
        layers.append(nn.Conv2d(after if index else before, after, 3, padding=1, bias=not batch_norm))
        layers += [nn.BatchNorm2d(after), nn.ReLU()] if batch_norm else [nn.ReLU()]
    return layers


class ConvNet(Chain):
    """Six 3x3 convolutions with batch norm and rectifiers, for images of 28x28 or 32x32 pixels and the like.

    Without `batch_norm` they have biases instead, and need better first weights than torch's to train well. One has
    `width` channels, two have 2 `width`, two 4 `width` and the last 8 `width`, with 2x2 max pooling wherever channels
    double; then the mean over the remaining pixels, and a linear layer. Takes (N, in_channels, H, W), of at least 8
    pixels each way, and gives logits (N, num_classes). An image of CIFAR-10 takes 34 million products.

    >>> sum(parameter.numel() for parameter in ConvNet().parameters())
    576170
    """

    def __init__(self, num_classes: int = 10, in_channels: int = 3, width: int = 32, batch_norm: bool = True) -> None:
        config = {"num_classes": num_classes, "in_channels": in_channels, "width": width, "batch_norm": batch_norm}
        _check(self, config)
        layers: list[nn.Module] = []
        before = in_channels
        for stage, count in enumerate((1, 2, 2, 1)):
            after = width * 2**stage
            if stage:
                layers.append(nn.MaxPool2d(2))
            layers += _convolutions(before, after, count, batch_norm)
            before = after
        layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, num_classes)]
        super().__init__(layers, config)


class LeNet(Chain):
    """LeNet-5 with rectifiers and max pooling, for square images.

    Two 5x5 convolutions (6 channels with padding 2, then 16 without), each followed by 2x2 pooling, then
    linear layers of 120, 84 and `num_classes` units. Takes (N, in_channels, image_size, image_size) and
    gives logits (N, num_classes). Reference: LeCun et al. (1998), Gradient-based learning applied to
    document recognition, section II.B.

    >>> sum(parameter.numel() for parameter in LeNet().parameters())
    61706
    """

    def __init__(self, num_classes: int = 10, in_channels: int = 1, image_size: int = 28) -> None:
        config = {"num_classes": num_classes, "in_channels": in_channels, "image_size": image_size}
        for name, value in config.items():
            least = 12 if name == "image_size" else 1  # 12 pixels leave 1 after pool, convolution, pool
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"LeNet.{name} must be a whole number of at least {least}. Got {shown(value)}.")
        side = (image_size // 2 - 4) // 2
        layers = (
            *(nn.Conv2d(in_channels, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
            *(nn.Linear(16 * side * side, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, num_classes)),
        )
        super().__init__(layers, config)


CONVOLUTIONS = {11: (1, 1, 2, 2, 2), 13: (2, 2, 2, 2, 2), 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}  # per stage


class VGG(Chain):
    """The network of Simonyan and Zisserman for 32x32 images, of `depth` 11, 13, 16 or 19.

    Five stages of 3x3 convolutions with `width` times 1, 2, 4, 8 and 8 channels, each layer with batch norm (unless
    `batch_norm` is False, when it has a bias instead) and a rectifier, each stage followed by 2x2 max pooling; a single
    linear layer on the remaining pixel stands for the three of the original, which `depth` counts. Takes (N,
    in_channels, 32, 32) and gives logits (N, num_classes). Without batch norm the deeper ones need better first weights
    than torch's, under which signals fade. Reference: Simonyan and Zisserman (2015), Very deep convolutional networks
    for large-scale image recognition, table 1, columns A, B, D and E.

    >>> sum(parameter.numel() for parameter in VGG().parameters())
    20035018
    """

    def __init__(
        self, depth: int = 19, num_classes: int = 10, in_channels: int = 3, batch_norm: bool = True, width: int = 64
    ) -> None:
        config = {"depth": depth, "num_classes": num_classes, "in_channels": in_channels}
        config |= {"batch_norm": batch_norm, "width": width}
        _check(self, config)
        if isinstance(depth, bool) or depth not in CONVOLUTIONS:
            raise ValueError(f"VGG.depth must be 11, 13, 16 or 19. Got {shown(depth)}.")
        layers: list[nn.Module] = []
        before = in_channels
        for stage, count in enumerate(CONVOLUTIONS[depth]):
            after = width * 2 ** min(stage, 3)
            layers += [*_convolutions(before, after, count, batch_norm), nn.MaxPool2d(2)]
            before = after
        layers += [nn.Flatten(), nn.Linear(before, num_classes)]
        super().__init__(layers, config)


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with batch norm, added to their input: relu(x + f(x)).

    Takes (N, in_channels, H, W) and gives (N, out_channels, ceil(H / stride), ceil(W / stride)). Where the shapes
    differ, the input is taken at every `stride`-th pixel and the channels it lacks are zeros, half of them before and
    half after its own (option A of He et al.), so that the shortcut has no weights.
    """

    def __init__(self, in_channels: int, out_channels: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(out_channels)
        self.stride = stride
        self.missing = out_channels - in_channels

    def forward(self, x: Tensor) -> Tensor:
        change = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        if self.stride > 1 or self.missing:
            x = self.padded(x[:, :, :: self.stride, :: self.stride])
        return F.relu(x + change)

    def padded(self, x: Tensor) -> Tensor:
        """Pad images (..., in_channels, H, W) with zero channels to `out_channels`."""
        before = self.missing // 2
        return F.pad(x, (0, 0, 0, 0, before, self.missing - before))


class ResNet(Chain):
    """The residual network with batch norm for CIFAR images, of `depth` 6 n + 2: 20, 32, 44, 56, 110.

    A 3x3 convolution to `width` channels, then three groups of n residual blocks with `width`, 2 `width` and
    4 `width` channels, the second and third group at half the resolution of the one before, the mean over pixels
    and a linear layer. Takes (N, in_channels, H, W), of any size, and gives logits (N, num_classes). Reference: He et
    al. (2016), Deep residual learning for image recognition, section 4.2; shortcuts of option A, without weights.

    >>> sum(parameter.numel() for parameter in ResNet().parameters())
    269722
    """

    def __init__(self, depth: int = 20, num_classes: int = 10, in_channels: int = 3, width: int = 16) -> None:
        config = {"depth": depth, "num_classes": num_classes, "in_channels": in_channels, "width": width}
        for name, value in config.items():
            positive_whole(f"ResNet.{name}", value)
        blocks, rest = divmod(depth - 2, 6)
        if rest or blocks < 1:
            raise ValueError(f"ResNet.depth must be 6 n + 2 with n at least 1: 8, 14, 20, ... Got {depth}.")
        layers: list[nn.Module] = _convolutions(in_channels, width, 1, batch_norm=True)
        before = width
        for group in range(3):
            after = width * 2**group
            for block in range(blocks):
                layers.append(ResidualBlock(before, after, stride=2 if group and not block else 1))
                before = after
        layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, num_classes)]
        super().__init__(layers, config)
