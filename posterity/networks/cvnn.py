"""A small plain convolutional network."""

from torch import nn

from posterity.errors import shown
from posterity.networks.chain import Chain


class ConvNet(Chain):
    """Five 3x3 convolutions with batch norm and rectifiers, for images of 28x28 or 32x32 pixels and the like.

    One with `width` channels, two with 2 `width` and two with 4 `width`, each of these three stages followed by 2x2 max
    pooling; then the mean over the pixels that are left, and a linear layer. Takes (N, in_channels, H, W), of at least
    8 pixels each way, and gives logits (N, num_classes). As it stands, an image of CIFAR-10 takes 29 million products.

    >>> sum(parameter.numel() for parameter in ConvNet().parameters())
    279466
    """

    def __init__(self, num_classes: int = 10, in_channels: int = 3, width: int = 32) -> None:
        config = {"num_classes": num_classes, "in_channels": in_channels, "width": width}
        for name, value in config.items():
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"ConvNet.{name} must be a whole number of at least 1. Got {shown(value)}.")
        layers: list[nn.Module] = []
        before = in_channels
        for stage, count in enumerate((1, 2, 2)):
            after = width * 2**stage
            for _ in range(count):
                layers += [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
                before = after
            layers.append(nn.MaxPool2d(2))
        layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, num_classes)]
        super().__init__(layers, config)
