"""Checks of targets that several likelihoods share."""

import torch
from torch import Tensor

from posterity.errors import BadData, shown

AS_OUTPUTS = "of the outputs, "
REMEDY = "Reshape the targets, or give the network one output for each target."


def shaped(name: str, targets: Tensor, shape: torch.Size, whose: str = AS_OUTPUTS, remedy: str = REMEDY) -> Tensor:
    """Targets of the wanted shape (N, *event), where (N,) also stands for (N, 1); else BadData."""
    if targets.dim() == 1 and shape == (*targets.shape, 1):
        targets = targets.unsqueeze(-1)
    if targets.shape != shape or not targets.dim():
        raise BadData(
            f"{name}: targets must have the shape {whose}{tuple(shape)}. Got {tuple(targets.shape)}. {remedy}"
        )
    return targets


def real(
    name: str, targets: Tensor, shape: torch.Size, dtype: torch.dtype, whose: str = AS_OUTPUTS, remedy: str = REMEDY
) -> Tensor:
    """Finite targets of the wanted shape and dtype; else BadData."""
    if not targets.is_floating_point() or targets.dtype != dtype:
        raise BadData(
            f"{name}: targets must have the outputs' dtype {dtype}. Got {targets.dtype}. Convert with y.to({dtype})."
        )
    targets = shaped(name, targets, shape, whose, remedy)
    finite = torch.isfinite(targets)
    if not finite.all():
        row = first_row(~finite)
        raise BadData(
            f"{name}: targets must be finite. Got {shown(targets[row])} in row {row}. Drop or repair that row."
        )
    return targets


def first_row(bad: Tensor) -> int:
    """The first row of (N, *event) in which any entry is true."""
    return int(bad.reshape(len(bad), -1).any(-1).nonzero()[0])
