"""Data sets: labelled rows for training and for testing."""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from posterity.errors import BadData, shown
from posterity.numerics.random import Key

Task = Literal["regression", "classification"]


@dataclass(frozen=True, eq=False)
class LabelledData:
    """Inputs (N, ...) and their targets: (N, D) numbers for regression, (N,) int64 labels for classification."""

    inputs: Tensor
    targets: Tensor

    def __post_init__(self) -> None:
        if self.inputs.dim() == 0 or self.targets.dim() == 0 or len(self.inputs) != len(self.targets):
            raise BadData(
                "LabelledData: inputs and targets must have the same number of rows. "
                f"Got {tuple(self.inputs.shape)} and {tuple(self.targets.shape)}."
            )

    def __len__(self) -> int:
        """Number of rows N."""
        return len(self.inputs)

    @property
    def pair(self) -> tuple[Tensor, Tensor]:
        """`(inputs, targets)`, as `infer` takes them."""
        return self.inputs, self.targets

    def rows(self, index: Tensor) -> "LabelledData":
        """Return a copy of the rows at `index`."""
        return LabelledData(self.inputs[index], self.targets[index])


@dataclass(frozen=True, eq=False)
class DataSet:
    """A named problem: its task, training and test rows, and for classification the names of the classes."""

    name: str
    task: Task
    train: LabelledData
    test: LabelledData
    classes: tuple[str, ...] | None = None

    def validation_split(self, fraction: float, seed: int = 0) -> tuple["DataSet", LabelledData]:
        """Hold out a random `fraction` of the training rows; returns the data set without them, and these rows.

        Both parts keep the order of the rows; test rows are untouched.

        >>> rows = LabelledData(torch.zeros(10, 1), torch.zeros(10, 1))
        >>> rest, held_out = DataSet("zeros", "regression", rows, rows).validation_split(0.2)
        >>> len(rest.train), len(held_out)
        (8, 2)
        """
        count = len(self.train)
        wanted = isinstance(fraction, (int, float)) and 0 < fraction < 1
        held = round(fraction * count) if wanted else 0
        if not 0 < held < count:
            raise ValueError(
                "DataSet.validation_split: fraction must be between 0 and 1 and leave rows on both sides. "
                f"Got {shown(fraction)} of {count} rows."
            )
        order = Key(seed).fold("validation").permutation(count)
        held_out, kept = torch.sort(order[:held]).values, torch.sort(order[held:]).values
        return replace(self, train=self.train.rows(kept)), self.train.rows(held_out)
