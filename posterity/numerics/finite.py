"""Whether numbers are finite, found without memory of their size."""

import torch
from torch import Tensor


def all_finite(values: Tensor) -> Tensor:
    """Return whether no entry is NaN or infinite, (): the smallest and the largest tell.

    >>> all_finite(torch.tensor([1.0, torch.nan])), all_finite(torch.zeros(0))
    (tensor(False), tensor(True))
    """
    values = values.detach()
    ends = torch.stack((values.amin(), values.amax())) if values.numel() else values  # whatever the strides
    return torch.isfinite(ends).all()


def finite_rows(values: Tensor) -> Tensor:
    """Return whether each row of a matrix (N, K) is finite, (N,).

    >>> finite_rows(torch.tensor([[1.0, torch.inf], [0.0, 2.0]]))
    tensor([False,  True])
    """
    ends = torch.stack((values.amin(1), values.amax(1))) if values.shape[1] else values.T
    return torch.isfinite(ends).all(0)
