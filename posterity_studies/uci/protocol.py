"""The protocol of the standard splits: standardised rows, one hidden layer, scores in the units of the target."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from posterity.datasets import DataSet, LabelledData, uci_regression
from posterity.likelihoods import Gaussian
from posterity.metrics import negative_log_likelihood, root_mean_squared_error
from posterity.model import Joint
from posterity.networks import MLP
from posterity.numerics.random import Key
from posterity.predictive.predictive import Predictive
from posterity.priors import Normal
from posterity_studies.uci.settings import Settings

HELD_OUT = 0.2  # of the training rows, where a method chooses settings of its own

Choice = dict[str, float]
"""Settings that were chosen on held-out rows, by name."""


class Keyed(Protocol):
    """Settings that have a key for each split."""

    def key(self, data_set: str, split: int) -> Key:
        """What all randomness of a split grows from."""
        ...


@dataclass(frozen=True, eq=False)
class Split:
    """One split, standardised by means and scales of its training rows; those of the target are kept."""

    data_set: str
    index: int
    train: LabelledData
    test: LabelledData
    target_mean: float
    target_scale: float

    def scores(self, predictive: Predictive) -> dict[str, float]:
        """RMSE and NLL of the test rows, and the mean and the ends of the predictive scale, in units of the target."""
        targets, scale = self.test.targets, self.target_scale
        deviation = predictive.std.double() * scale
        return {
            "test_rmse": root_mean_squared_error(predictive, targets) * scale,
            "test_nll": negative_log_likelihood(predictive, targets) + math.log(scale),
            "mean_std": float(deviation.mean()),
            "smallest_std": float(deviation.min()),
            "largest_std": float(deviation.max()),
        }


def standard_split(name: str, index: int, constants: str = "zero") -> Split:
    """Split `index` of the data set `name`, ready for a network: float32, inputs and target standardised."""
    return standardised(uci_regression(name, index), index, constants)


def standardised(data: DataSet, index: int, constants: str = "zero") -> Split:
    """The data set with means 0 and scales 1 on its training rows; a constant input is 0, or "rounded" (`_moments`)."""
    inputs, targets = data.train.pair
    by_input, by_target = _moments(inputs, constants), _moments(targets)
    train, test = (
        LabelledData(_scaled(rows.inputs, by_input), _scaled(rows.targets, by_target))
        for rows in (data.train, data.test)
    )
    return Split(data.name, index, train, test, *map(float, by_target))


def held_out(split: Split, settings: Settings) -> Split:
    """The training rows alone: a fifth of them, drawn by seed and split, in the place of the test rows."""
    count = len(split.train)
    order = settings.key(split.data_set, split.index).fold("held out").permutation(count)
    held = max(1, round(HELD_OUT * count))
    test, train = (split.train.rows(torch.sort(rows).values) for rows in (order[:held], order[held:]))
    return replace(split, train=train, test=test)


def hidden_units(data_set: str) -> int:
    """100 units for protein, which has by far the most rows, 50 for the others."""
    return 100 if data_set == "protein-tertiary-structure" else 50


def problem(split: Split, settings: Settings) -> Joint:
    """The network of the protocol with noise to be learnt; its first weights follow from seed and split."""
    noise = Gaussian(scale=1.0, learn=True)
    return Joint(mlp(split, settings), noise, Normal(settings.prior_scale), len(split.train))


def mlp(split: Split, settings: Keyed, outputs: int = 1) -> MLP:
    """One hidden layer of ReLU units."""
    with own_start(split, settings):
        return MLP((split.train.inputs.shape[1], hidden_units(split.data_set), outputs), activation="relu")


@contextmanager
def own_start(split: Split, settings: Keyed) -> Iterator[None]:
    """Let networks that are made here begin at weights that follow from seed and split."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(settings.key(split.data_set, split.index).fold("network").seed)
        yield


def _moments(rows: Tensor, constants: str = "zero") -> tuple[Tensor, Tensor]:
    """Means and standard deviations of the columns; a constant one has exactly its value and 1, not rounding errors.

    Published runs divided by numpy's standard deviation unless it was 0. The mean of a column of 0.998 is off by its
    rounding, and so is every entry: divided by their standard deviation, which is that error, they become 1, a second
    bias of the first layer. `constants="rounded"` does the same.
    """
    constant = rows.amax(0) == rows.amin(0)
    mean, scale = rows[0], torch.ones_like(rows[0])
    if constants == "rounded":
        mean, scale = (torch.from_numpy(moment(axis=0)) for moment in (rows.numpy().mean, rows.numpy().std))
        scale = scale.masked_fill(scale == 0.0, 1.0)
    return torch.where(constant, mean, rows.mean(0)), torch.where(constant, scale, rows.std(0, correction=0))


def _scaled(rows: Tensor, moments: tuple[Tensor, Tensor]) -> Tensor:
    mean, scale = moments
    return ((rows - mean) / scale).float()
