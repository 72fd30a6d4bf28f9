"""The reference posterior of logistic regression on the German credit data."""

import json
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from posterity.datasets.files import HOST, check_sum, content
from posterity.datasets.location import data_folder

FILE = "reference_posterior.json"
_SUM = "afa0347a47cf16d38e5f96477877cca7900cec864a331fff5ba3c01be74f50cc"


class ReferenceMoments(NamedTuple):
    """Means (K,) of a posterior, their standard errors, and the standard deviations."""

    mean: Tensor
    mean_error: Tensor
    sd: Tensor


def german_credit_reference(root: str | Path | None = None) -> ReferenceMoments:
    """Moments of the 24 weights and the bias (25,), as the inference gym of TensorFlow Probability has them.

    Inputs are standardised over all 1000 rows (population standard deviation), bad is class 1, and weights and bias
    have N(0, 1) priors. `root` is the folder of the file, which is checked against its SHA-256; without it that is
    looked for in `data_folder("uci-classification")`.
    """
    path = (data_folder("uci-classification") / "german-credit" if root is None else Path(root)) / FILE
    data = content(path)
    check_sum(data, _SUM, path, "german-credit")
    found = json.loads(data)["logistic"]
    return ReferenceMoments(
        *(torch.tensor(found[key], dtype=torch.float64, device=HOST) for key in ("mean", "mean_standard_error", "sd"))
    )
