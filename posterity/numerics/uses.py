"""Operations that are linear in a weight, and the derivatives that they give."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from posterity.numerics.convolution_jacobian import Convolution, Window
from posterity.numerics.jacobian import Explicit, Jacobian
from posterity.numerics.layer_jacobians import Lookup, Matrix
from posterity.numerics.thin_jacobian import Thin


def stacked(columns: Sequence[Tensor] | Tensor) -> Tensor:
    """K tensors (N, ...) as (K, N, ...): as they are, or so that the columns of a row lie together in memory."""
    return columns if isinstance(columns, Tensor) else torch.stack(tuple(columns), 1).transpose(0, 1)


@dataclass(frozen=True, eq=False)
class Use(ABC):
    """One operation, linear in a tracked weight and in its bias, and where in the graph its output is."""

    weight: str | None
    bias: str | None
    edge: GradientEdge
    output_shape: torch.Size
    source: Tensor  # what the operation was applied to
    version: int  # of the source, which must not be written into later

    @property
    def names(self) -> tuple[str, ...]:
        """Names of its tracked tensors."""
        return tuple(name for name in (self.weight, self.bias) if name is not None)

    @property
    def overwritten(self) -> bool:
        """Whether the source was changed in place after the operation."""
        return self.source._version != self.version

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """(rows, columns) of the weight seen as a matrix."""

    @abstractmethod
    def jacobian(self, columns: Sequence[Tensor] | Tensor, differentiable: bool) -> Jacobian:
        """Derivatives in the weights of K scalars a row, whose derivatives in the output are (N, *output) each."""


@dataclass(frozen=True, eq=False)
class LinearUse(Use):
    """z = W a + b on the last axis."""

    columns: int

    @property
    def shape(self) -> tuple[int, int]:
        """(outputs, inputs)."""
        return self.output_shape[-1], self.columns

    def jacobian(self, columns: Sequence[Tensor] | Tensor, differentiable: bool) -> Thin | Matrix:
        """Axes between the first and the last are positions."""
        if len(self.output_shape) == 2:
            thin = None
            if self.weight is not None:
                thin = self.source if differentiable else self.source.detach()
            return Thin(thin, tuple(columns), self.bias is not None)
        gradients = stacked(columns)
        count, num = gradients.shape[:2]
        features = None
        if self.weight is not None:
            source = self.source if differentiable else self.source.detach()
            features = source.reshape(num, -1, 1, self.columns)
        return Matrix(features, gradients.reshape(count, num, -1, 1, self.output_shape[-1]), self.bias is not None)


@dataclass(frozen=True, eq=False)
class ConvolutionUse(Use):
    """A convolution over one or two axes."""

    window: Window

    @property
    def shape(self) -> tuple[int, int]:
        """(output channels, input channels of a group times the kernel)."""
        return self.output_shape[1], self.source.shape[1] // self.window.groups * prod(self.window.kernel)

    def jacobian(self, columns: Sequence[Tensor] | Tensor, differentiable: bool) -> Convolution:
        """Output pixels are positions, the patches below them the features."""
        gradients = stacked(columns)
        count, num = gradients.shape[:2]
        images = None
        if self.weight is not None:
            images = self.source if differentiable else self.source.detach()
        split = gradients.reshape(count, num, self.window.groups, -1, self.output_shape[2:].numel())
        return Convolution(images, split, self.window, self.bias is not None)


@dataclass(frozen=True, eq=False)
class EmbeddingUse(Use):
    """Rows of a table, looked up by index."""

    entries: int
    padding: int | None

    @property
    def shape(self) -> tuple[int, int]:
        """(entries, width)."""
        return self.entries, self.output_shape[-1]

    def jacobian(self, columns: Sequence[Tensor] | Tensor, differentiable: bool) -> Lookup:
        """The padding entry gets no gradient, as in torch."""
        gradients = stacked(columns)
        count, num = gradients.shape[:2]
        index = self.source.reshape(num, -1)
        flat = gradients.reshape(count, num, index.shape[1], -1)
        if self.padding is not None:
            flat = flat * (index != self.padding).to(flat.dtype).unsqueeze(-1)
        return Lookup(index, flat, self.entries, self.padding)


@dataclass(frozen=True, eq=False)
class ScaleUse(Use):
    """z = w a + b entry by entry, on what a normalisation made of its input."""

    normalise: Callable[[Tensor], Tensor]
    trailing: int | None  # how many last axes the weight has; None: it has that of channels, the second

    @property
    def shape(self) -> tuple[int, int]:
        """(entries of the weight, 1)."""
        return self._entries, 1

    @property
    def _entries(self) -> int:
        return self.output_shape[1] if self.trailing is None else self.output_shape[-self.trailing :].numel()

    def jacobian(self, columns: Sequence[Tensor] | Tensor, differentiable: bool) -> Explicit:
        """Few weights, so dense: sums over the positions at which each entry acts."""
        gradients = stacked(columns)
        parts = []
        if self.weight is not None:
            with torch.set_grad_enabled(differentiable):
                parts.append(self._summed(gradients * self.normalise(self.source)))
        if self.bias is not None:
            parts.append(self._summed(gradients))
        return Explicit(torch.stack(parts, -1).flatten(2).transpose(0, 1))

    def _summed(self, values: Tensor) -> Tensor:
        """(K, N, *output) -> (K, N, entries)."""
        count, num = values.shape[:2]
        if self.trailing is None:
            return values.reshape(count, num, self._entries, -1).sum(-1)
        return values.reshape(count, num, -1, self._entries).sum(-2)
