"""The residual network of the HMC reference: filter response norm in place of batch norm, SiLU, no batch statistics."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

EPSILON = 1e-6
CUT = 0.87962566103423978  # standard deviation of a standard normal number that is drawn within (-2, 2)


class FilterResponseNorm(nn.Module):
    """max(gamma x / sqrt(mean over pixels of x^2 + 1e-6) + beta, tau), for each channel of images (n, C, H, W).

    Reference: Singh and Krishnan (2020), Filter response normalization layer, eq. 1-4.

    >>> FilterResponseNorm(1)(torch.tensor([[[[3.0, 4.0]]]])).flatten()
    tensor([0.8485, 1.1314], grad_fn=<ViewBackward0>)
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gamma, self.beta, self.tau = (nn.Parameter(torch.empty(channels, 1, 1)) for _ in range(3))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set gamma to 1, beta and tau to 0."""
        with torch.no_grad():
            self.gamma.fill_(1.0)
            self.beta.zero_()
            self.tau.zero_()

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.rsqrt(x.square().mean((-2, -1), keepdim=True) + EPSILON)
        return torch.maximum(self.gamma * (x * scale) + self.beta, self.tau)


class Convolution(nn.Conv2d):
    """A convolution whose output has ceil(H / stride) rows, with more zeros after the image than before it.

    Weights begin at normal numbers of variance 2 / fan-in, drawn within two standard deviations; biases at zero.
    """

    def __init__(self, before: int, after: int, kernel: int = 3, stride: int = 1) -> None:
        super().__init__(before, after, kernel, stride)

    def reset_parameters(self) -> None:
        """Draw the weights anew, from torch's global generator."""
        scale = math.sqrt(2.0 / self.weight[0].numel()) / CUT
        nn.init.trunc_normal_(self.weight, 0.0, scale, -2.0 * scale, 2.0 * scale)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, input: Tensor) -> Tensor:
        size, (stride, _), (kernel, _) = input.shape[-1], self.stride, self.kernel_size
        missing = max(0, (-(-size // stride) - 1) * stride + kernel - size)
        low = missing // 2
        return super().forward(F.pad(input, (low, missing - low, low, missing - low)) if missing else input)


class Block(nn.Module):
    """SiLU(x + f(x)) with two normalised convolutions f; where shapes differ, x goes through a third, of one pixel."""

    def __init__(self, before: int, after: int, stride: int, rate: float) -> None:
        super().__init__()
        self.first, self.first_norm = Convolution(before, after, stride=stride), FilterResponseNorm(after)
        self.second, self.second_norm = Convolution(after, after), FilterResponseNorm(after)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1:
            self.shortcut = nn.Sequential(Convolution(before, after, 1, stride), FilterResponseNorm(after))
        self.dropout: nn.Module = nn.Dropout2d(rate) if rate else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        change = self.second_norm(self.second(F.silu(self.first_norm(self.first(x)))))
        result: Tensor = self.dropout(F.silu(self.shortcut(x) + change))
        return result


class Output(nn.Linear):
    """The last layer, which begins as `Convolution` does."""

    def reset_parameters(self) -> None:
        """Draw the weights anew, from torch's global generator."""
        scale = math.sqrt(2.0 / self.in_features) / CUT
        nn.init.trunc_normal_(self.weight, 0.0, scale, -2.0 * scale, 2.0 * scale)
        nn.init.zeros_(self.bias)


class FilterResponseResNet(nn.Sequential):
    """The network of Izmailov et al. (2021), for CIFAR-10 with `depth` 20 (of 6 n + 2) and `width` 16.

    A convolution to `width` channels, three groups of blocks with `width`, 2 `width` and 4 `width` channels, the second
    and third at half the resolution of the one before, the mean over pixels, and a linear layer. Every convolution has
    a bias and is followed by filter response norm. With a `rate` channels drop after each block, under `MCDropout`
    alone.

    >>> sum(parameter.numel() for parameter in FilterResponseResNet().parameters())
    274042
    """

    def __init__(self, depth: int = 20, width: int = 16, classes: int = 10, rate: float = 0.0) -> None:
        blocks = (depth - 2) // 6
        layers: list[nn.Module] = [Convolution(3, width), FilterResponseNorm(width), nn.SiLU()]
        before = width
        for group in range(3):
            after = width * 2**group
            for index in range(blocks):
                layers.append(Block(before, after, 2 if group and not index else 1, rate))
                before = after
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), Output(before, classes))
