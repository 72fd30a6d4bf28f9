"""Residual networks for small images."""

from torch import Tensor, nn
from torch.nn import functional as F

from posterity.errors import positive_whole
from posterity.networks.layers import Chain


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
        """The block's outputs."""
        change = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        if self.stride > 1 or self.missing:
            x = self.padded(x[:, :, :: self.stride, :: self.stride])
        return F.relu(x + change)

    def padded(self, x: Tensor) -> Tensor:
        """Images (..., in_channels, H, W) with the channels that they lack."""
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
        layers: list[nn.Module] = [
            nn.Conv2d(in_channels, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
        ]
        before = width
        for group in range(3):
            after = width * 2**group
            for block in range(blocks):
                layers.append(ResidualBlock(before, after, stride=2 if group and not block else 1))
                before = after
        layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, num_classes)]
        super().__init__(layers, config)
