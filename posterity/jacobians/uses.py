"""Operations of a forward pass that use weights, with the Jacobian of each."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from posterity.jacobians.convolution import Convolution, Window
from posterity.jacobians.jacobian import Explicit, Jacobian
from posterity.jacobians.linear import Lookup, Matrix, Thin


def stacked(columns: Sequence[Tensor] | Tensor) -> Tensor:
    """K tensors (N, ...) as (K, N, ...); a sequence is laid out with the columns of a row together in memory."""
    return widened(columns if isinstance(columns, Tensor) else torch.stack(tuple(columns), 1).transpose(0, 1))


def widened(values: Tensor) -> Tensor:
    """Values of half precision, as under autocast, in float32: they go into sums of squares."""
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


LAYOUTS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "first": lambda values, rows: values,
    "second": lambda values, rows: values.transpose(0, 1),
    "flat": lambda values, rows: values.reshape(rows, -1, *values.shape[1:]),
    "flat second": lambda values, rows: values.reshape(-1, rows, *values.shape[1:]).transpose(0, 1),
}
"""Where the rows of a batch may lie in a tensor: (N, ...), (T, N, ...), (N T, ...) or (T N, ...). Each function takes
the tensor and N, and puts the rows first."""

PACKED = "it runs on a packed sequence"


def possible_layouts(shape: torch.Size, rows: int) -> list[str]:
    """Layouts that a tensor of this shape may have for this many rows."""
    first = ["first"] if shape[0] == rows else []
    second = ["second"] if len(shape) > 2 and shape[1] == rows else []
    flat = ["flat", "flat second"] if shape[0] > rows and shape[0] % rows == 0 else []
    return first + second + flat


class Region(NamedTuple):
    """Rows of a tracked tensor from `low` on, all of them where it is `whole`, or the transpose of these."""

    name: str
    low: int = 0
    transposed: bool = False
    whole: bool = True


@dataclass(frozen=True, eq=False)
class Use(ABC):
    """An operation that is linear in a tracked weight and its bias, with the graph edge of its output."""

    weight: str | None
    bias: str | None
    edge: GradientEdge
    output_shape: torch.Size
    source: Tensor  # input of the operation
    version: int  # of the source, which must not be written into later
    first_row: int = field(default=0, kw_only=True)  # of the weight as it is stored, where a part of its rows is used
    first_bias: int = field(default=0, kw_only=True)
    transposed: bool = field(default=False, kw_only=True)  # whether the weight is stored as (columns, rows)
    direct: bool = field(default=True, kw_only=True)  # whether the module itself called a linear map or convolution
    layout: str = field(default="first", kw_only=True)  # of LAYOUTS
    rows: int = field(default=0, kw_only=True)  # of the batch, for layouts that need it

    def arranged(self, layout: str, rows: int) -> Self:
        """The use on a batch of this many rows, whose tensors have them as the layout says."""
        return self if layout == "first" else replace(self, layout=layout, rows=rows)

    def rows_first(self, values: Tensor) -> Tensor:
        """Values shaped as output or source, with the rows of the batch on the first axis."""
        return LAYOUTS[self.layout](values, self.rows)

    @property
    def layouts(self) -> list[str]:
        """Layouts that its Jacobian can take."""
        return ["first"]

    @property
    def row_shape(self) -> torch.Size:
        """Shape of the output with the rows of the batch on the first axis."""
        return self.rows_first(torch.empty(self.output_shape, device="meta")).shape

    def collected(self, columns: Sequence[Tensor] | Tensor) -> Tensor:
        """Gradients (K, N, ...) of K columns, with the rows of the batch on their first axis."""
        if self.layout == "first":
            return stacked(columns)
        return stacked([self.rows_first(column) for column in columns])

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tracked tensors."""
        return tuple(name for name in (self.weight, self.bias) if name is not None)

    @property
    def overwritten(self) -> bool:
        """Whether the source was changed in place after the operation."""
        return self.source._version != self.version

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """(rows, columns) of the weight as a matrix."""

    @abstractmethod
    def jacobian(self, columns: Sequence[Tensor] | Tensor, differentiable: bool) -> Jacobian:
        """Derivatives in the weights of K scalars per row, whose derivatives in the output are (N, *output) each."""

    def by_label(self, outputs: Tensor) -> Tensor:
        """Values shaped as the output, as (N positions, channels)."""
        return self.rows_first(outputs).reshape(-1, outputs.shape[-1])

    def label_features(self, differentiable: bool) -> Tensor | None:
        """Features (N positions, columns), None where only the bias is tracked."""
        features = self.features(differentiable)
        return None if features is None else features.reshape(-1, features.shape[-1])

    def features(self, differentiable: bool) -> Tensor | None:
        """The source with the rows first, None where only the bias is tracked."""
        if self.weight is None:
            return None
        return widened(self.rows_first(self.source if differentiable else self.source.detach()))


@dataclass(frozen=True, eq=False)
class LinearUse(Use):
    """z = W a + b on the last axis."""

    columns: int

    @property
    def layouts(self) -> list[str]:
        return list(LAYOUTS)

    @property
    def shape(self) -> tuple[int, int]:
        return self.output_shape[-1], self.columns

    def jacobian(self, columns: Sequence[Tensor] | Tensor, differentiable: bool) -> Thin | Matrix:
        features = self.features(differentiable)
        if self.layout == "first" and len(self.output_shape) == 2:
            return Thin(features, tuple(map(widened, columns)), self.bias is not None)
        gradients = self.collected(columns)
        count, num = gradients.shape[:2]
        if features is not None:
            features = features.reshape(num, -1, 1, self.columns)
        return Matrix(features, gradients.reshape(count, num, -1, 1, self.output_shape[-1]), self.bias is not None)


@dataclass(frozen=True, eq=False)
class ConvolutionUse(Use):
    """A convolution over one or two axes."""

    window: Window

    @property
    def shape(self) -> tuple[int, int]:
        """(output channels, input channels of a group times the kernel)."""
        return self.output_shape[1], self.source.shape[1] // self.window.groups * prod(self.window.kernel)

    def by_label(self, outputs: Tensor) -> Tensor:
        return outputs.flatten(2).transpose(1, 2).flatten(0, 1)

    def label_features(self, differentiable: bool) -> Tensor | None:
        images = self.features(differentiable)
        return None if images is None else self.window.patches(images)[:, :, 0].flatten(0, 1)

    def jacobian(self, columns: Sequence[Tensor] | Tensor, differentiable: bool) -> Convolution:
        gradients = stacked(columns)
        split = gradients.reshape(*gradients.shape[:2], self.window.groups, -1, self.output_shape[2:].numel())
        return Convolution(self.features(differentiable), split, self.window, self.bias is not None)


@dataclass(frozen=True, eq=False)
class TransposedConvolutionUse(Use):
    """A transposed convolution over one or two axes without groups, whose weights are (inputs, outputs, *kernel).

    At each pixel of the input it is linear: the channels there go to a patch of the output.
    """

    window: Window

    @property
    def shape(self) -> tuple[int, int]:
        """(output channels times the kernel, input channels)."""
        return self.output_shape[1] * prod(self.window.kernel), self.source.shape[1]

    def jacobian(self, columns: Sequence[Tensor] | Tensor, differentiable: bool) -> Matrix:
        gradients = stacked(columns)
        patches = self.window.patches(gradients.flatten(0, 1))  # (K N, pixels of the input, 1, O times kernel)
        features = self.features(differentiable)
        assert features is not None
        pixels = features.flatten(2).mT.unsqueeze(2)  # (N, pixels, 1, I)
        return Matrix(pixels, patches.view(*gradients.shape[:2], *patches.shape[1:]), bias=False)


@dataclass(frozen=True, eq=False)
class EmbeddingUse(Use):
    """A lookup of rows of a table by index."""

    entries: int
    padding: int | None

    @property
    def layouts(self) -> list[str]:
        return list(LAYOUTS)

    @property
    def shape(self) -> tuple[int, int]:
        return self.entries, self.output_shape[-1]

    def jacobian(self, columns: Sequence[Tensor] | Tensor, differentiable: bool) -> Lookup:
        gradients = self.collected(columns)
        count, num = gradients.shape[:2]
        index = self.rows_first(self.source).reshape(num, -1)
        flat = gradients.reshape(count, num, index.shape[1], -1)
        if self.padding is not None:
            flat = flat * (index != self.padding).to(flat.dtype).unsqueeze(-1)
        return Lookup(index, flat, self.entries, self.padding)


@dataclass(frozen=True, eq=False)
class ScaleUse(Use):
    """z = w a + b entry by entry, where a is a normalised input."""

    normalise: Callable[[Tensor], Tensor]
    trailing: int | None  # number of last axes that the weight has; None: it has the axis of channels, the second

    @property
    def layouts(self) -> list[str]:
        return ["first"] if self.trailing is None else list(LAYOUTS)

    @property
    def shape(self) -> tuple[int, int]:
        return self._entries, 1

    @property
    def _entries(self) -> int:
        return self.output_shape[1] if self.trailing is None else self.output_shape[-self.trailing :].numel()

    def jacobian(self, columns: Sequence[Tensor] | Tensor, differentiable: bool) -> Explicit:
        """Dense, since there are few weights: sums over the positions at which each entry acts."""
        gradients = self.collected(columns)
        parts = []
        if self.weight is not None:
            with torch.set_grad_enabled(differentiable):
                parts.append(self._summed(gradients * self.rows_first(self.normalise(self.source))))
        if self.bias is not None:
            parts.append(self._summed(gradients))
        return Explicit(torch.stack(parts, -1).flatten(2).transpose(0, 1))

    def _summed(self, values: Tensor) -> Tensor:
        """(K, N, *output) -> (K, N, entries)."""
        count, num = values.shape[:2]
        if self.trailing is None:
            return values.reshape(count, num, self._entries, -1).sum(-1)
        return values.reshape(count, num, -1, self._entries).sum(-2)


@dataclass(frozen=True, eq=False)
class BroadcastUse(Use):
    """z = y + w, or copies of w, where w has the same entries for all rows."""

    size: torch.Size  # shape of w

    @property
    def shape(self) -> tuple[int, int]:
        return self.size.numel(), 1

    def jacobian(self, columns: Sequence[Tensor] | Tensor, differentiable: bool) -> Explicit:
        gradients = stacked(columns)  # (K, N, *output)
        padded = (1,) * (gradients.dim() - 1 - len(self.size)) + tuple(self.size)
        summed = gradients.sum_to_size(*gradients.shape[:2], *padded[1:])
        return Explicit(summed.reshape(*gradients.shape[:2], -1).transpose(0, 1))
