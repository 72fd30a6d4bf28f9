"""The classic small convolutional network."""

from torch import nn

from posterity.errors import shown
from posterity.networks.chain import Chain


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
