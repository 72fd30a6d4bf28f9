"""Random augmentation of images before each training step, on their device."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from posterity.errors import BadData, positive_whole, shown
from posterity.numerics.random import Key

Padding = Literal["zeros", "reflect"]


class Augmentation(ABC):
    """A random change of images: a policy, given to data by `as_data(..., augmentation=...)`.

    Called with images (n, C, H, W) and a key, it returns new images of the same shape, each changed by separate draws.
    For members, (M, n, C, H, W), a single key gives the same draws to all, and M keys separate draws. The same key
    makes the same images on the same kind of device. The CPU does not wait for the device.

    A new policy is a frozen dataclass with the number of uniform numbers per image (`numbers`) and their effect
    (`applied`).

    **Limit**: mini-batches alone are augmented. `num_data` remains the number of rows, so a step uses the likelihood
    of one changed copy of each row; over many steps this averages the log-likelihoods of the copies, which is not the
    log-likelihood of a model of the data. Such posteriors are not quite Bayesian, and often predict better at a lower
    temperature, for which augmentation is one proposed explanation.

    **References**: Wenzel et al. (2020), How good is the Bayes posterior in deep neural networks really?;
    Izmailov et al. (2021), What are Bayesian neural network posteriors really like?; Nabarro et al. (2022),
    Data augmentation in Bayesian neural networks and the cold posterior effect.
    """

    @property
    @abstractmethod
    def numbers(self) -> int:
        """Number of uniform numbers for the change of one image."""

    @abstractmethod
    def applied(self, images: Tensor, uniforms: Tensor) -> Tensor:
        """Images (n, C, H, W), changed according to uniform numbers (n, `numbers`) on [0, 1)."""

    @property
    def least_side(self) -> int:
        """Smallest allowed height and width of an image in pixels."""
        return 1

    def __call__(self, images: Tensor, key: Key | Sequence[Key]) -> Tensor:
        """Return changed images; see the class."""
        check_images(self, images)
        keys = [key] if isinstance(key, Key) else list(key)
        members = images.shape[:-4]  # () or (M,)
        if len(keys) > 1 and members != (len(keys),):
            raise ValueError(f"There must be one key, or one for each member. Got {len(keys)} for {_shape(images)}.")
        shape = (images.shape[-4], self.numbers)
        draws = torch.stack([each.uniform(shape, torch.float32, images.device) for each in keys])
        draws = draws.expand(*(members or (1,)), *shape).flatten(0, 1)  # (M n, numbers)
        return self.applied(images.reshape(-1, *images.shape[-3:]), draws).view(images.shape)


@dataclass(frozen=True)
class Crop(Augmentation):
    """Crop of the image's own size at a uniform position in the image with `padding` pixels around.

    The image moves by -padding .. padding pixels, vertically and horizontally. The padding is zeros (black, for images
    in [0, 1]), or the image mirrored at its edge (`mode="reflect"`).

    >>> Crop(1)(torch.ones(5, 3, 8, 8), Key(0)).shape
    torch.Size([5, 3, 8, 8])
    """

    padding: int = 4
    mode: Padding = "zeros"

    def __post_init__(self) -> None:
        positive_whole("Crop.padding", self.padding)
        if self.mode not in get_args(Padding):
            raise ValueError(f"Crop.mode must be 'zeros' or 'reflect'. Got {shown(self.mode)}.")

    @property
    def numbers(self) -> int:
        return 2

    @property
    def least_side(self) -> int:
        """See `Augmentation`: reflection needs the mirrored pixels and the edge."""
        return self.padding + 1 if self.mode == "reflect" else 1

    def applied(self, images: Tensor, uniforms: Tensor) -> Tensor:
        padded = F.pad(images, (self.padding,) * 4, mode="constant" if self.mode == "zeros" else "reflect")
        # A view of every window of every image: (n, C, rows, columns, H, W).
        windows = padded.unfold(2, images.shape[2], 1).unfold(3, images.shape[3], 1)
        # No float32 number below 1 is rounded up to 2 padding + 1.
        row, column = (uniforms * (2 * self.padding + 1)).long().unbind(-1)
        return windows[torch.arange(len(images), device=images.device), :, row, column]


@dataclass(frozen=True)
class Flip(Augmentation):
    """The image mirrored left to right, with a probability.

    >>> bool((Flip(1.0)(torch.arange(4.0).view(1, 1, 1, 4), Key(0)) == torch.tensor([3.0, 2.0, 1.0, 0.0])).all())
    True
    """

    probability: float = 0.5

    def __post_init__(self) -> None:
        given = self.probability
        if isinstance(given, bool) or not isinstance(given, (int, float)) or not 0.0 < given <= 1.0:
            raise ValueError(f"Flip.probability must be above 0 and at most 1. Got {shown(given)}.")

    @property
    def numbers(self) -> int:
        return 1

    def applied(self, images: Tensor, uniforms: Tensor) -> Tensor:
        return torch.where((uniforms < self.probability).view(-1, 1, 1, 1), images.flip(-1), images)


@dataclass(frozen=True)
class Affine(Augmentation):
    """The image rotated, zoomed and sheared about its middle, each by a uniform amount; bilinear, black outside.

    The angle is at most `degrees` either way, the zoom 1 - zoom .. 1 + zoom, and rows move sideways by -shear .. shear
    of their distance to the middle. Sizes stay; `Crop` moves the image as a whole.

    >>> Affine(degrees=10.0)(torch.ones(5, 1, 8, 8), Key(0)).shape
    torch.Size([5, 1, 8, 8])
    """

    degrees: float = 10.0
    zoom: float = 0.1
    shear: float = 0.1

    def __post_init__(self) -> None:
        for name, most in (("degrees", 180.0), ("zoom", 0.9), ("shear", 1.0)):
            given = getattr(self, name)
            if isinstance(given, bool) or not isinstance(given, (int, float)) or not 0.0 <= given <= most:
                raise ValueError(f"Affine.{name} must be from 0 to {most:g}. Got {shown(given)}.")

    @property
    def numbers(self) -> int:
        return 3

    def applied(self, images: Tensor, uniforms: Tensor) -> Tensor:
        rotation, zoom, shear = (2.0 * uniforms - 1.0).unbind(-1)
        return warped(images, self.degrees * rotation, 1.0 + self.zoom * zoom, self.shear * shear)


def warped(images: Tensor, degrees: Tensor, zoom: Tensor | float = 1.0, shear: Tensor | float = 0.0) -> Tensor:
    """Images (n, C, H, W) sheared, zoomed and then rotated anticlockwise about their middle, by amounts (n,).

    >>> image = torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]])
    >>> warped(image, torch.tensor([90.0])).round().tolist()
    [[[[2.0, 4.0], [1.0, 3.0]]]]
    """
    dtype = torch.promote_types(images.dtype, torch.float32)  # grid_sample has no half precision on a CPU
    angle, (height, width) = torch.deg2rad(degrees.to(dtype)), images.shape[-2:]
    # The result shows at (x, y), x to the right and y down, what the image has at (right, down), by its columns.
    down_x, down_y = angle.sin() / zoom, angle.cos() / zoom
    right_x, right_y = down_y - shear * down_x, -down_x - shear * down_y
    none = torch.zeros_like(down_x)
    lines = (right_x, right_y * (height / width), none, down_x * (width / height), down_y, none)  # sides are [-1, 1]
    places = F.affine_grid(torch.stack(lines, -1).view(-1, 2, 3), list(images.shape), align_corners=False)
    return F.grid_sample(images.to(dtype), places, align_corners=False).to(images.dtype)


@dataclass(frozen=True)
class Compose(Augmentation):
    """Several policies in sequence, each with separate draws.

    >>> usual = Compose((Crop(4), Flip()))  # of CIFAR-10
    >>> usual.numbers
    3
    """

    policies: tuple[Augmentation, ...]

    def __post_init__(self) -> None:
        given = self.policies
        if not isinstance(given, (tuple, list)) or not given or not all(isinstance(p, Augmentation) for p in given):
            raise ValueError(f"Compose.policies must be policies such as (Crop(4), Flip()). Got {shown(given)}.")
        object.__setattr__(self, "policies", tuple(given))

    @property
    def numbers(self) -> int:
        return sum(policy.numbers for policy in self.policies)

    @property
    def least_side(self) -> int:
        return max(policy.least_side for policy in self.policies)

    def applied(self, images: Tensor, uniforms: Tensor) -> Tensor:
        each = torch.split(uniforms, [policy.numbers for policy in self.policies], dim=-1)
        for policy, own in zip(self.policies, each, strict=True):
            images = policy.applied(images, own)
        return images


def check_images(policy: Augmentation, images: object, per_member: bool | None = None) -> None:
    """Raise BadData unless the policy can change these images, with a member axis or without (None: either)."""
    lead = {None: (4, 5), False: (4,), True: (5,)}[per_member]
    if not isinstance(images, Tensor) or images.dim() not in lead or not images.is_floating_point():
        wanted = "members, rows, channels, height, width" if per_member else "rows, channels, height, width"
        came = f"{_shape(images)} of {images.dtype}" if isinstance(images, Tensor) else f"several {shown(type(images))}"
        raise BadData(
            f"Augmentation needs images, one tensor of floating point ({wanted}), as inputs. Got {came}. "
            "Reshape the inputs, or leave augmentation out."
        )
    if min(images.shape[-2:]) < policy.least_side:
        raise BadData(
            f"{policy} needs images of at least {policy.least_side} pixels each way. Got {_shape(images)}. "
            "Use less padding."
        )


def _shape(images: Tensor) -> str:
    return f"shape {tuple(images.shape)}"
