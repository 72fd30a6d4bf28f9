"""Sums over blocks in a fixed binary tree, of which each process adds up its own branches."""

from collections.abc import Callable, Sequence

from torch import Tensor

Node = tuple[int, int]
"""The blocks low .. high - 1 of a branch: a power of two of them, at a multiple of their number."""


def bounds(rows: int, blocks: int, block: int) -> tuple[int, int]:
    """Return the rows low .. high - 1 of a block: blocks differ by one row at most, and some may be empty.

    >>> [bounds(10, 4, block) for block in range(4)]
    [(0, 2), (2, 5), (5, 7), (7, 10)]
    """
    return block * rows // blocks, (block + 1) * rows // blocks


def branches(rank: int, size: int, blocks: int) -> list[Node]:
    """Return the largest branches of the tree that make up the blocks of one of `size` processes, in order.

    >>> [branches(rank, 3, 8) for rank in range(3)]
    [[(0, 2)], [(2, 4), (4, 5)], [(5, 6), (6, 8)]]
    """
    low, end = bounds(blocks, size, rank)
    result = []
    while low < end:
        width = low & -low or blocks
        while low + width > end:
            width //= 2
        result.append((low, low + width))
        low += width
    return result


def branch_sum(node: Node, known: Callable[[Node], Sequence[Tensor] | None]) -> Sequence[Tensor]:
    """Return the sums of the tensors of a branch from those of `known` branches, which are written over."""
    tensors = known(node)
    if tensors is not None:
        return tensors
    low, high = node
    middle = (low + high) // 2
    left, right = branch_sum((low, middle), known), branch_sum((middle, high), known)
    return [own.add_(more) for own, more in zip(left, right, strict=True)]
