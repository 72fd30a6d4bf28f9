"""Calls of a module for all members at once: as groups of channels, by vmap, or in turn."""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from statistics import median
from typing import TypeAlias

import torch
from torch import Tensor, nn

from posterity.model.batch import Inputs
from posterity.model.grouped import Grouped
from posterity.model.layouts import channels_last
from posterity.model.module import plain_attention
from posterity.model.passes import unobserved

logger = logging.getLogger("posterity")

WIDE = 128  # channels; see `Members.wide`

Result: TypeAlias = tuple[Tensor, dict[str, Tensor]]
Call: TypeAlias = Callable[..., Result]  # of weights, inputs, buffers, and a function in place of the module


class Members:
    """Runs the members of a module at once where it can; copies of a network share it."""

    def __init__(self, module: nn.Module, adapted: bool) -> None:
        self._module, self._adapted = module, adapted
        self._kernels = [part for part in module.modules() if isinstance(part, nn.Conv2d)]
        self._layouts: list[Callable[[Tensor], Tensor]] = [channels_last, Tensor.contiguous]  # of images, by preference
        self._ungrouped: list[str] = []  # why members do not run as groups of channels
        self._refusals: list[str] = []  # why vmap refuses the module

    @property
    def convolve(self) -> bool:
        """Whether the module has convolutions of images."""
        return bool(self._kernels)

    @cached_property
    def wide(self) -> bool:
        """Whether kernels are so wide that a GPU is faster with members one by one than with grouped convolutions."""
        return median(min(kernel.in_channels, kernel.out_channels) for kernel in self._kernels) >= WIDE

    def run(
        self,
        call: Call,
        loop: Callable[[], Result],
        weights: Sequence[Tensor],
        inputs: Inputs,
        buffers: Mapping[str, Tensor],
        shared: set[str],
        per_member: bool,
        dropping: bool,
    ) -> Result:
        """Outputs and buffers at weights (M, ...) and buffers (M, ...) but for those that are `shared`."""
        images = isinstance(inputs, Tensor) and inputs.dim() == (5 if per_member else 4)
        reason = ""
        if images and self._kernels and not (self._adapted or self._ungrouped or dropping) and unobserved():
            for number, layout in enumerate(self._layouts):
                try:
                    result = self._by_groups(call, weights, inputs, buffers, shared, per_member, layout)
                except Exception as error:  # of a rule, or of the module, which raises it again below
                    reason = _reason(error)
                else:
                    self._layouts = self._layouts[number:]
                    return result
        if self._refusals:
            return loop()
        together = torch.func.vmap(
            call,
            in_dims=(0, 0 if per_member else None, {name: None if name in shared else 0 for name in buffers}),
            randomness="same" if dropping else "error",
        )
        try:
            with plain_attention():
                result = together(tuple(weights), inputs, buffers)
        except (RuntimeError, ValueError) as error:
            result = loop()  # raises if the module is at fault
            self._refusals.append(_reason(error))
            logger.warning("members run one after the other because vmap refused this module: %s", _reason(error))
        if reason:
            self._ungrouped.append(reason)
            logger.info("members do not run as groups of channels: %s", reason)
        return result

    def _by_groups(
        self,
        call: Call,
        weights: Sequence[Tensor],
        inputs: Inputs,
        buffers: Mapping[str, Tensor],
        shared: set[str],
        per_member: bool,
        layout: Callable[[Tensor], Tensor],
    ) -> Result:
        count = len(weights[0])

        def module(rows: Tensor) -> Tensor:
            images = layout(rows.transpose(0, 1).flatten(1, 2) if per_member else rows)
            outputs = self._module(Grouped.of(images, count, channels=True) if per_member else images)
            if not isinstance(outputs, Grouped):
                raise TypeError(f"the module returns {type(outputs).__name__}, not one tensor")
            return outputs.stacked()

        own = {n: b if n in shared else Grouped.of(b.contiguous(), count) for n, b in buffers.items()}
        with plain_attention():
            outputs, after = call([Grouped.of(w, count) for w in weights], inputs, own, module)
        return outputs, {name: b.stacked() if isinstance(b, Grouped) else b for name, b in after.items()}


def _reason(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
