"""Jacobians in the weights of a convolution, whose patches are formed for a few rows at a time."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor
from torch.nn import functional

from posterity.jacobians.jacobian import CACHED, Explicit, Jacobian, Outline, added, chunk_size
from posterity.jacobians.linear import Matrix


@dataclass(frozen=True)
class Window:
    """Geometry of a convolution over one or two axes."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def patches(self, images: Tensor) -> Tensor:
        """Input patches of each output pixel: (N, C, *size) -> (N, pixels, G, C / G times kernel)."""
        kernel, stride, padding, dilation = self.kernel, self.stride, self.padding, self.dilation
        if len(kernel) == 1:
            images = images.unsqueeze(2)
            kernel, stride, padding, dilation = (1, *kernel), (1, *stride), (0, *padding), (1, *dilation)
        if any(length > 1 for length in dilation):
            columns = functional.unfold(images, kernel, dilation, padding, stride)
            return columns.view(len(columns), self.groups, -1, columns.shape[-1]).permute(0, 3, 1, 2)
        if any(padding):
            images = functional.pad(images, (padding[1], padding[1], padding[0], padding[0]))
        # Views on the image, (N, C, *pixels, *kernel), and one copy: torch's own unfold goes image by image.
        views = images.unfold(2, kernel[0], stride[0]).unfold(3, kernel[1], stride[1])
        return views.permute(0, 2, 3, 1, 4, 5).reshape(
            len(images), -1, self.groups, views.shape[1] // self.groups * kernel[0] * kernel[1]
        )


@dataclass(frozen=True, eq=False)
class Convolution(Jacobian):
    """A `Matrix` whose positions are the output pixels and whose features are their patches of `images`.

    `images` are (N, C, *size), None where only the bias is wanted, and `gradients` (D, N, G, O, T). `turned` holds
    rotations (outer, inner) of the coordinates, see `Matrix.rotated`.

    >>> window = Window((2,), (1,), (0,), (1,), groups=1)
    >>> part = Convolution(torch.tensor([[[1.0, 2.0, 3.0]]]), torch.ones(1, 1, 1, 1, 2), window, bias=True)
    >>> part.rows()
    tensor([[[3., 5., 2.]]])
    """

    images: Tensor | None
    gradients: Tensor
    window: Window
    bias: bool
    turned: tuple[Tensor, Tensor] | None = None

    @property
    def outline(self) -> Outline:
        outputs, rows, groups, out, _ = self.gradients.shape
        return Outline.like(self.gradients, rows, outputs, groups * out * self.width)

    @property
    def positions(self) -> int:
        """T."""
        return self.gradients.shape[4]

    @property
    def width(self) -> int:
        """Number of features, the 1 of the bias included."""
        if self.images is None:
            return 1
        return self.images.shape[1] // self.window.groups * prod(self.window.kernel) + int(self.bias)

    def rows(self) -> Tensor:
        return torch.cat([part.rows() for _, part in self.chunks()])

    def narrow(self, low: int, high: int) -> Jacobian:
        """The rows as a `Matrix` with patches; or dense, where that is cheaper to rotate."""
        part = self._matrix(low, high)
        if self.turned is None:
            return part
        outputs, out, width = self.num_outputs, self.gradients.shape[3], self.width
        if self.positions * (width**2 + outputs * out**2) <= outputs * out * width * (width + out):
            return part.rotated(*self.turned)
        outer, inner = (turn.to(self.dtype) for turn in self.turned)
        rows = part.rows().reshape(high - low, outputs, -1, out, width)  # (N, D, G, O, I)
        return Explicit((outer.mT @ rows @ inner).flatten(2))

    def _matrix(self, low: int, high: int) -> Matrix:
        """The rows with their patches, not rotated."""
        features = None if self.images is None else self.window.patches(self.images[low:high])
        return Matrix(features, self.gradients[:, low:high].permute(0, 1, 4, 2, 3), self.bias)

    def chunks(self, share: int = CACHED) -> Iterator[tuple[int, Jacobian]]:
        entries = max(self.num_outputs * self.size, self.width * self.positions * self.gradients.shape[2])
        step = max(1, chunk_size(self.device, share) // max(1, entries))
        for low in range(0, self.num_rows, step):
            yield low, self.narrow(low, min(self.num_rows, low + step))

    def inner_gram(self, weights: Tensor | None) -> Tensor:
        """`Matrix.inner_gram`, summed over chunks of rows."""
        entries = self.width * self.positions * self.gradients.shape[2]
        step = max(1, chunk_size(self.device, CACHED) // max(1, entries))
        chunks = ((low, min(self.num_rows, low + step)) for low in range(0, self.num_rows, step))
        return added(
            self._matrix(low, high).inner_gram(None if weights is None else weights[low:high]) for low, high in chunks
        )

    def outer_gram(self) -> Tensor:
        """`Matrix.outer_gram`, without permuting the pixels."""
        if self.device.type != "cpu":  # many small products are slower there than a copy and a large one
            return torch.einsum("dngot,dngpt->gop", self.gradients, self.gradients)
        flat = self.gradients.transpose(0, 1).flatten(0, 1)  # (N D, G, O, T)
        step = max(1, chunk_size(self.device, CACHED) // max(1, flat[0].numel()))
        total = flat.new_zeros(flat.shape[1], flat.shape[2], flat.shape[2])
        for low in range(0, len(flat), step):
            part = flat[low : low + step]
            total += (part @ part.mT).sum(0)
        return total

    def rotated(self, outer: Tensor, inner: Tensor) -> "Convolution":
        """J in the coordinates outer^T W inner."""
        assert self.turned is None
        return Convolution(self.images, self.gradients, self.window, self.bias, (outer, inner))

    def weighted_gram(self, variance: Tensor) -> Tensor:
        return torch.cat([part.weighted_gram(variance) for _, part in self.chunks()])

    def weighted_squares(self, variance: Tensor) -> Tensor:
        return torch.cat([part.weighted_squares(variance) for _, part in self.chunks()])

    def products(self, vectors: Tensor) -> Tensor:
        return torch.cat([part.products(vectors) for _, part in self.chunks()], 1)

    def joint_gram(self, variance: Tensor) -> Tensor:
        part = self._matrix(0, self.num_rows)
        return (part if self.turned is None else part.rotated(*self.turned)).joint_gram(variance)
