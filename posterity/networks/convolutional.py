"""Plain convolutional networks: ConvNet, LeNet, VGG."""

from collections.abc import Mapping

from torch import nn

from posterity.errors import positive_whole, shown
from posterity.networks.layers import Chain


def _check(network: nn.Module, config: Mapping[str, object]) -> None:
    """Refuse numbers of channels and classes that are none, and a `batch_norm` that is no bool."""
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
    double; then the mean over the pixels that are left, and a linear layer. Takes (N, in_channels, H, W), of at least 8
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
            nn.Conv2d(in_channels, 6, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 16, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(16 * side * side, 120),
            nn.ReLU(),
            nn.Linear(120, 84),
            nn.ReLU(),
            nn.Linear(84, num_classes),
        )
        super().__init__(layers, config)


CONVOLUTIONS = {11: (1, 1, 2, 2, 2), 13: (2, 2, 2, 2, 2), 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}  # of each stage


class VGG(Chain):
    """The network of Simonyan and Zisserman for 32x32 images, of `depth` 11, 13, 16 or 19.

    Five stages of 3x3 convolutions with `width` times 1, 2, 4, 8 and 8 channels, each layer with batch norm (unless
    `batch_norm` is False, when it has a bias instead) and a rectifier, each stage followed by 2x2 max pooling; then, of
    the one pixel that is left, a single linear layer in place of the three that the original has for large images, and
    `depth` counts. Takes (N, in_channels, 32, 32) and gives logits (N, num_classes). Without batch norm the deeper ones
    need better first weights than torch's, by which signals fade from layer to layer. Reference: Simonyan and Zisserman
    (2015), Very deep convolutional networks for large-scale image recognition, table 1, columns A, B, D and E.

    >>> sum(parameter.numel() for parameter in VGG().parameters())
    20035018
    """

    def __init__(
        self, depth: int = 19, num_classes: int = 10, in_channels: int = 3, batch_norm: bool = True, width: int = 64
    ) -> None:
        config = {
            "depth": depth,
            "num_classes": num_classes,
            "in_channels": in_channels,
            "batch_norm": batch_norm,
            "width": width,
        }
        _check(self, config)
        if isinstance(depth, bool) or depth not in CONVOLUTIONS:
            raise ValueError(f"VGG.depth must be 11, 13, 16 or 19. Got {shown(depth)}.")
        layers: list[nn.Module] = []
        before = in_channels
        for stage, count in enumerate(CONVOLUTIONS[depth]):
            after = width * 2 ** min(stage, 3)
            layers += _convolutions(before, after, count, batch_norm)
            before = after
            layers.append(nn.MaxPool2d(2))
        layers += [nn.Flatten(), nn.Linear(before, num_classes)]
        super().__init__(layers, config)
