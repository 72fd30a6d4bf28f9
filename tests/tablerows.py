"""Small tables, and estimators that fit them in a few hundredths of a second: linear, with given scales."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import nn

from posterity.estimators import BayesianClassifier, BayesianRegressor
from posterity.likelihoods import Gaussian
from posterity.priors import Normal

ROWS = 40


@dataclass(frozen=True)
class Linear:
    """A linear model in float64; its repr, of which names of tests are made, is always the same."""

    def __call__(self, inputs: int, outputs: int) -> nn.Module:
        return nn.Linear(inputs, outputs, dtype=torch.float64)


FAST: dict[str, Any] = {"network": Linear(), "prior": Normal(1.0), "device": "cpu"}


def regressor(method: Any = "laplace", **settings: Any) -> BayesianRegressor:
    return BayesianRegressor(method, **{"likelihood": Gaussian(scale=0.5), **FAST, **settings})


def classifier(method: Any = "laplace", **settings: Any) -> BayesianClassifier:
    return BayesianClassifier(method, **{**FAST, **settings})


def numbers() -> tuple[Any, Any]:
    """Rows (N, 3) of normal numbers, and a target that is linear in them but for noise."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(ROWS, 3))
    return X, X @ [1.0, -0.5, 0.2] + 3.0 + 0.3 * rng.normal(size=ROWS)


def frame() -> tuple[pd.DataFrame, pd.Series]:
    """A frame of every kind of column, and a target."""
    rng = np.random.default_rng(1)
    table = pd.DataFrame(
        {
            "size": rng.normal(size=ROWS),
            "count": rng.integers(0, 9, ROWS),
            "colour": rng.choice(["red", "green", "blue"], ROWS),
            "day": pd.date_range("2024-01-01", periods=ROWS, freq="3D"),
            "open": rng.random(ROWS) > 0.5,
            "code": pd.Categorical(rng.choice([7, 8, 9], ROWS)),
        }
    )
    target = table["size"] + 0.3 * table["count"] + 1.5 * (table["colour"] == "red") + 0.1 * rng.normal(size=ROWS)
    table.loc[4, "size"], table.loc[7, "colour"] = np.nan, None
    return table, target.fillna(0.0)
