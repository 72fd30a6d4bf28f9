"""Products X^T X at little more than half the price."""

from torch import Tensor

BLOCKS = 4
LEAST = 256  # columns below which one product is quicker


def upper_gram(matrix: Tensor, out: Tensor | None = None) -> Tensor:
    """X^T X for X (n, d) on and above its diagonal, added to `out`; what is below, where X is wide, is not to be read.

    Takes (BLOCKS + 1) / (2 BLOCKS) of the multiplications. `symmetric` makes the whole of it.

    >>> import torch
    >>> symmetric(upper_gram(torch.tensor([[1.0, 2.0]])))
    tensor([[1., 2.],
            [2., 4.]])
    """
    size = matrix.shape[1]
    out = matrix.new_zeros(size, size) if out is None else out
    blocks = BLOCKS if size >= LEAST else 1
    width = -(-size // blocks)
    for low in range(0, size, width):
        high = min(size, low + width)
        out[low:high, low:].addmm_(matrix[:, low:high].T, matrix[:, low:])
    return out


def symmetric(upper: Tensor) -> Tensor:
    """The symmetric matrices (..., d, d) whose upper triangles are given."""
    return upper.triu() + upper.triu(1).mT
