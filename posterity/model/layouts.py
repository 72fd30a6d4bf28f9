"""The memory layout of images and kernels: on a GPU with the channels last."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor, nn

from posterity.model.batch import Inputs
from posterity.numerics.modules import uncompiled

logger = logging.getLogger("posterity")

CHANNELS_LAST_ON = ("cuda",)
"""Devices whose fast kernels take images with the channels last in memory."""

T = TypeVar("T")
_Weight = TypeVar("_Weight", Tensor, Tensor | None)


def channels_last(images: Tensor) -> Tensor:
    """The images (n, C, H, W) with the channels last in memory, on devices that prefer it."""
    last = images.device.type in CHANNELS_LAST_ON
    return images.contiguous(memory_format=torch.channels_last) if last else images


def aligned(weight: _Weight) -> _Weight:
    """The weight at an address that cuDNN's batch norm can read with channels last: slices of theta begin anywhere."""
    astray = weight is not None and weight.is_cuda and weight.storage_offset() * weight.element_size() % 16
    return weight.clone() if weight is not None and astray else weight


def laid_out(weights: Sequence[Tensor], inputs: Inputs, train: bool) -> tuple[Sequence[Tensor], Inputs]:
    """Weights and inputs of a single network with convolutions in the layout that its device prefers.

    In training kernels also get the type in which autocast computes: one pass over them, instead of one for the type
    and one for the layout, which the backward pass would repeat. Other weights are aligned. Otherwise weights stay as
    they are: derivatives of outputs recognise them.
    """
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor  # pyright: ignore[reportAttributeAccessIssue]
    if not isinstance(inputs, Tensor) or inputs.dim() != 4 or inputs.device.type not in CHANNELS_LAST_ON:
        return weights, inputs
    if wrapped(inputs):  # vmap knows no layouts
        return weights, inputs
    if not train or any(map(wrapped, weights)):
        return weights, channels_last(inputs)
    half = torch.is_autocast_enabled("cuda") and inputs.dtype != torch.float64
    kind = torch.get_autocast_dtype("cuda") if half else inputs.dtype
    kernels = (w.to(kind, memory_format=torch.channels_last) if w.dim() == 4 else w for w in weights)
    return [aligned(w) for w in kernels], channels_last(inputs)


@dataclass
class ImageLayout:
    """Whether a module is called with images in the layout that the device prefers; copies of a network share it.

    A module that splits the axes of images by `view` refuses it. From then on images are as they come.
    """

    wanted: bool
    refusals: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, module: nn.Module) -> "ImageLayout":
        """The layout for a module with convolutions, unless torch.compile has chosen one."""
        return cls(uncompiled(module) is module and any(isinstance(part, nn.Conv2d) for part in module.modules()))

    def call(
        self, function: Callable[[Sequence[Tensor], Inputs], T], weights: Sequence[Tensor], inputs: Inputs, train: bool
    ) -> T:
        """Return the function of weights and inputs in the preferred layout; as they are if the module refuses it."""
        if not self.wanted or self.refusals:
            return function(weights, inputs)
        given = laid_out(weights, inputs, train)
        try:
            return function(*given)
        except RuntimeError as error:
            if (given[0] is weights and given[1] is inputs) or "view size is not compatible" not in str(error):
                raise
        result = function(weights, inputs)  # raises if the module is at fault
        self.refusals.append("channels last")
        logger.info("images keep their memory layout, since the model calls view on them; reshape would allow another")
        return result
