"""Rows of a study (training, held out, test), their order by seed, keys of stored results, and printed means."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from posterity import __version__
from posterity.datasets import DataSet, LabelledData
from posterity.errors import BadData
from posterity.inference.identity import identity
from posterity.model.batch import Data
from posterity.model.data import OwnOrders, Reordered, TensorData
from posterity.numerics.random import Key
from posterity.storage import Part


def split_rows(
    whole: DataSet, *, rows: int | None, held_out: int, seed: int
) -> tuple[LabelledData, LabelledData | None]:
    """Split the training rows into rows to train on, and `held_out` others (None without any).

    The seed chooses the held-out rows; the first `rows` of the others, in the order of the data set, train.
    """
    train, held = whole.train, None
    if held_out:
        if held_out >= len(train):
            raise ValueError(f"held_out must leave some of the {len(train)} training rows. Got {held_out}.")
        rest, held = whole.validation_split(held_out / len(train), seed)
        train = rest.train
    if rows is not None and rows > len(train):
        raise ValueError(f"rows must be at most the {len(train)} training rows that are not held out. Got {rows}.")
    return LabelledData(train.inputs[:rows], train.targets[:rows]), held


def moments(inputs: Tensor, instead: str) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation by channel, or by column of a table, shaped for the inputs.

    BadData where some do not vary; `instead` says what to do then.
    """
    axes = [axis for axis in range(inputs.dim()) if axis != 1]
    mean = inputs.mean(axes, keepdim=True, dtype=torch.float64)
    scale = inputs.double().std(axes, keepdim=True)
    if not bool((scale > 0).all()):
        raise BadData(f"The training inputs do not vary in some channel, so they cannot be scaled. {instead}")
    return mean.float(), scale.float()


def own_orders(rows: TensorData, seeds: Sequence[int]) -> Data:
    """Return the rows with an order and an augmentation for each seed; several seeds are members."""
    labels = [f"seed {seed}" for seed in seeds]
    if len(seeds) == 1:
        return Reordered(rows, labels[0])
    return OwnOrders(rows, lambda key: [key.fold(label) for label in labels])


def first_weights(fresh: Callable[[Key], Tensor], seeds: Sequence[int], key: Key) -> Tensor:
    """Return the first weights that `fresh` draws by the key of each seed, (P,) or (seeds, P)."""
    weights = {seed: fresh(key.fold(seed)) for seed in dict.fromkeys(seeds)}
    return weights[seeds[0]] if len(seeds) == 1 else torch.stack([weights[seed] for seed in seeds])


def depends_on(cell: Any, settings: Any, **how: object) -> Part:
    """Return the part that determines the results of a cell: its values, the shared settings, and its method."""
    own = {"fit" if name == "seed" else name: value for name, value in asdict(cell).items()}
    return identity(**own, **settings.common(), **how, posterity=__version__)


def with_error(mean: float, error: float | None) -> str:
    """Format a mean and its error, to two digits of the error.

    >>> with_error(0.078899, 0.0006), with_error(2.09, None)
    ('0.07890 ± 0.00060', '2.09')
    """
    if not error:
        return f"{mean:.4g}"
    digits = max(0, 1 - math.floor(math.log10(error)))
    return f"{mean:.{digits}f} ± {error:.{digits}f}"
