"""A small plain convolutional network."""

from torch import nn

from posterity.errors import shown
from posterity.networks.chain import Chain


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
        for name in ("num_classes", "in_channels", "width"):
            value = config[name]
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"ConvNet.{name} must be a whole number of at least 1. Got {shown(value)}.")
        if not isinstance(batch_norm, bool):
            raise ValueError(f"ConvNet.batch_norm must be True or False. Got {shown(batch_norm)}.")
        layers: list[nn.Module] = []
        before = in_channels
        for stage, count in enumerate((1, 2, 2, 1)):
            after = width * 2**stage
            if stage:
                layers.append(nn.MaxPool2d(2))
            for _ in range(count):
                layers.append(nn.Conv2d(before, after, 3, padding=1, bias=not batch_norm))
                layers += [nn.BatchNorm2d(after), nn.ReLU()] if batch_norm else [nn.ReLU()]
                before = after
        layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, num_classes)]
        super().__init__(layers, config)
