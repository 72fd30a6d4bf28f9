"""Changes of images by rising strengths, in plain torch: the same key gives the same images."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn import functional as F

from posterity.model.augmentation import warped
from posterity.numerics.random import Key


@dataclass(frozen=True)
class Change:
    """A change of images (n, C, H, W) in [0, 1]: what its strengths are, those that are measured, and the change."""

    label: str
    strengths: tuple[float, ...]
    apply: Callable[[Tensor, float, Key], Tensor]


def rotated(images: Tensor, degrees: float, key: Key) -> Tensor:
    """Images turned anticlockwise about their middle, black outside."""
    return warped(images, torch.full((len(images),), degrees, device=images.device))


def noisy(images: Tensor, scale: float, key: Key) -> Tensor:
    """Images with independent normal noise of this standard deviation, cut to [0, 1]."""
    return (images + scale * key.normal(images.shape, images.dtype, images.device)).clamp(0.0, 1.0)


def blurred(images: Tensor, scale: float, key: Key) -> Tensor:
    """Images convolved with a normal density of this standard deviation in pixels, cut after three of them.

    >>> round(float(blurred(torch.ones(1, 1, 9, 9), 1.0, Key(0))[0, 0, 4, 4]), 6)
    1.0
    """
    reach = max(1, round(3.0 * scale))
    places = torch.arange(-reach, reach + 1, dtype=images.dtype, device=images.device)
    weights = (-0.5 * (places / scale) ** 2).exp()
    weights = weights / weights.sum()
    rows = images.flatten(0, 1).unsqueeze(1)  # (n C, 1, H, W)
    rows = F.conv2d(rows, weights.view(1, 1, -1, 1), padding=(reach, 0))
    return F.conv2d(rows, weights.view(1, 1, 1, -1), padding=(0, reach)).view_as(images)


def faded(images: Tensor, share: float, key: Key) -> Tensor:
    """Images from which this share of the distance to their mean pixel is taken.

    >>> faded(torch.tensor([[[[0.0, 1.0]]]]), 0.5, Key(0))
    tensor([[[[0.2500, 0.7500]]]])
    """
    return torch.lerp(images, images.mean((1, 2, 3), keepdim=True), share)


def occluded(images: Tensor, share: float, key: Key) -> Tensor:
    """Images with a grey square somewhere, whose side is this share of the shorter side."""
    height, width = images.shape[-2:]
    side = max(1, round(share * min(height, width)))
    free = torch.tensor([height - side + 1, width - side + 1], device=images.device)
    corner = (key.uniform((len(images), 2), torch.float32, images.device) * free).long()  # (n, 2)
    down, right = (
        (torch.arange(length, device=images.device) - start.unsqueeze(1))
        for length, start in zip((height, width), corner.unbind(1), strict=True)
    )
    inside = ((down >= 0) & (down < side)).unsqueeze(2) & ((right >= 0) & (right < side)).unsqueeze(1)  # (n, H, W)
    return images.masked_fill(inside.unsqueeze(1), 0.5)


CHANGES: Mapping[str, Change] = MappingProxyType(
    {
        "rotation": Change("rotation, degrees", (15.0, 30.0, 45.0, 60.0, 90.0, 135.0, 180.0), rotated),
        "noise": Change("Gaussian noise, standard deviation", (0.1, 0.2, 0.3, 0.45, 0.6), noisy),
        "blur": Change("blur, standard deviation in pixels", (0.5, 1.0, 1.5, 2.0, 3.0), blurred),
        "contrast": Change("lost contrast", (0.2, 0.4, 0.6, 0.8, 0.9), faded),
        "occlusion": Change("side of a grey square, share of the image", (0.1, 0.2, 0.3, 0.4, 0.5), occluded),
    }
)
"""The changes by name; strength 0 is the image as it is."""
