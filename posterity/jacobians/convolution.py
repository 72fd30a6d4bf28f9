"""Jacobians in the weights of a convolution, whose patches are formed for a few rows at a time."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor
from torch.nn import functional

from posterity.jacobians.jacobian import CACHED, Explicit, Jacobian, Outline, added, chunk_size, small_parts
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
        if len(self.kernel) == 1:
            return self._tall.patches(images.unsqueeze(3))
        if any(length > 1 for length in self.dilation):
            columns = functional.unfold(images, self.kernel, self.dilation, self.padding, self.stride)
            return columns.view(len(columns), self.groups, -1, columns.shape[-1]).permute(0, 3, 1, 2)
        # Views on the image, (N, C, *pixels, *kernel), and one copy: torch's own unfold goes image by image.
        views = self._padded(images).unfold(2, self.kernel[0], self.stride[0]).unfold(3, self.kernel[1], self.stride[1])
        return views.permute(0, 2, 3, 1, 4, 5).reshape(
            len(images), -1, self.groups, views.shape[1] // self.groups * prod(self.kernel)
        )

    @property
    def _tall(self) -> "Window":
        """The same over images (N, C, size, 1), of a window over one axis."""
        return Window((*self.kernel, 1), (*self.stride, 1), (*self.padding, 0), (*self.dilation, 1), self.groups)

    def _padded(self, images: Tensor) -> Tensor:
        rows, columns = self.padding
        return functional.pad(images, (columns, columns, rows, rows)) if rows or columns else images

    def slides(self, height: int) -> bool:
        """Whether `Gram` takes images of this height, and needs less work than products of whole patches."""
        rows = self.kernel[0]
        plain = self.groups == 1 and self.stride[0] == 1 and all(length == 1 for length in self.dilation)
        return plain and 1 < rows <= min(2 * self.padding[0] + 1, height // 2)


def laid_out(weight: Tensor, source: Tensor) -> Tensor:
    """The weight with its channels last in memory where those of the images are, so that gradients have them last too.

    cuDNN would take such a copy in each pass, and return gradients in the layout of the weight.
    """
    last = source.dim() == 4 and source.is_contiguous(memory_format=torch.channels_last) and not source.is_contiguous()
    return weight.contiguous(memory_format=torch.channels_last) if last else weight


class Gram:
    """The sum of p p^T over all patches p of images, by products of their rows.

    A patch has a kernel's rows of one line each, and lines u and u + d of it are lines r and r + d of the padded image.
    So all pairs of lines at a distance d share one product, over all r, less the few r at the edge of the image that
    lie outside for u. With K x K kernels that takes K products of a K-th of the width in place of one of the whole, and
    a K-th of the memory.
    """

    def __init__(self, window: Window, images: Tensor) -> None:
        """Take all images (N, C, *size); `add` comes to them in parts."""
        if len(window.kernel) == 1:
            window, images = window._tall, images.unsqueeze(3)
        self.window, self.images = window, images
        rows, padding = window.kernel[0], window.padding[0]
        self.lines = images.shape[2] + 2 * padding  # of the padded image
        self.width = images.shape[1] * window.kernel[1]  # numbers of a line of a patch
        self.whole = images.new_zeros(rows, self.width, self.width)
        self.outside = {  # lines r outside for u, whose products with r + d are not zero
            (d, u): [
                (d, r)
                for r in (*range(u), *range(self.lines - rows + u + 1, self.lines - d))
                if padding <= r and r + d < self.lines - padding
            ]
            for d in range(rows)
            for u in range(rows - d)
        }
        self.pairs = sorted({pair for outside in self.outside.values() for pair in outside})
        self.edges = images.new_zeros(len(self.pairs), self.width, self.width)
        self.totals = images.new_zeros(self.lines, self.width)

    @property
    def row_entries(self) -> int:
        """Numbers that `add` forms for each image."""
        return self.lines * self.width * self.images.shape[3]

    def add(self, low: int, high: int, totals: bool) -> None:
        """Add some of the images; with `totals` also sums of patches."""
        window = self.window
        views = window._padded(self.images[low:high]).unfold(3, window.kernel[1], window.stride[1])
        lines = views.permute(0, 2, 3, 1, 4).reshape(high - low, self.lines, -1, self.width)
        flat, pixels = lines.flatten(0, 2), lines.shape[2]
        for d, product in enumerate(self.whole):  # lines r + d of the next image are zero, or lines r of this one
            product.addmm_(flat[: len(flat) - d * pixels].T, flat[d * pixels :])
        if self.pairs:
            first = torch.stack([lines[:, r] for _, r in self.pairs]).flatten(1, 2)  # (pairs, n pixels, width)
            apart = any(d for d, _ in self.pairs)
            second = torch.stack([lines[:, r + d] for d, r in self.pairs]).flatten(1, 2) if apart else first
            self.edges += first.mT @ second
        if totals:
            self.totals += lines.sum((0, 2))

    def sums(self) -> Tensor:
        """The sum of p p^T, (C times kernel, C times kernel)."""
        rows, columns = self.window.kernel
        blocks, edges = dict[tuple[int, int], Tensor](), dict(zip(self.pairs, self.edges, strict=True))
        for (d, u), outside in self.outside.items():
            block = self.whole[d]
            for pair in outside:
                block = block - edges[pair]
            blocks[u, u + d] = block
            blocks[u + d, u] = block.T
        grid = torch.stack([blocks[u, v] for u in range(rows) for v in range(rows)])
        return (
            grid.view(rows, rows, -1, columns, self.width // columns, columns)
            .permute(2, 0, 3, 4, 1, 5)
            .reshape(rows * self.width, -1)
        )

    def patch_totals(self) -> Tensor:
        """The sum of all patches, (C times kernel,), of what was added with `totals`."""
        rows, columns = self.window.kernel
        each = self.totals.unfold(0, self.lines - rows + 1, 1).sum(-1)  # (rows, C columns)
        return each.view(rows, -1, columns).transpose(0, 1).flatten()


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
        for low, high in self._ranges(entries, share):
            yield low, self.narrow(low, high)

    def inner_gram(self, weights: Tensor | None) -> Tensor:
        """`Matrix.inner_gram`, summed over chunks of rows."""
        if weights is None and self.images is not None and self.window.slides(self.images.shape[2]):
            return self._gram_of_lines(Gram(self.window, self.images))
        entries = self.width * self.positions * self.gradients.shape[2]
        return added(
            self._matrix(low, high).inner_gram(None if weights is None else weights[low:high])
            for low, high in self._ranges(entries)
        )

    def _gram_of_lines(self, gram: Gram) -> Tensor:
        """`inner_gram` by products of lines of patches, both triangles."""
        for low, high in self._ranges(gram.row_entries):
            gram.add(low, high, self.bias)
        inner = gram.sums()
        if self.bias:
            totals = gram.patch_totals().unsqueeze(1)
            count = totals.new_full((1, 1), float(self.num_rows * self.positions))
            inner = torch.cat([torch.cat([inner, totals], 1), torch.cat([totals.T, count], 1)])
        return inner.div_(self.positions).unsqueeze(0)

    def _ranges(self, entries: int, share: int = CACHED) -> Iterator[tuple[int, int]]:
        """Yield (first row, end) of chunks, for so many entries that are formed of each row."""
        step = max(1, chunk_size(self.device, share) // max(1, entries))
        return ((low, min(self.num_rows, low + step)) for low in range(0, self.num_rows, step))

    def outer_gram(self) -> Tensor:
        """`Matrix.outer_gram`, without permuting the pixels."""
        if not small_parts(self.device):  # many small products are slower there than a copy and a large one
            flat = self.gradients.permute(2, 3, 0, 1, 4).flatten(2)  # (G, O, D N T), a view where channels are last
            return flat @ flat.mT
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
