"""Draws of chains in the form of ArviZ, which is imported here and nowhere else."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from posterity.errors import PosterityError

# What ArviZ calls the statistics that samplers keep; others go by their own names.
NAMES = {
    "log_density": "lp",
    "divergent": "diverging",
    "accept": "acceptance_rate",
    "leapfrogs": "n_steps",
    "depth": "tree_depth",
    "cut_off": "reached_max_treedepth",
}


def inference_data(values: dict[str, Tensor], statistics: dict[str, Tensor], log_likelihood: Tensor | None) -> Any:
    """An `arviz.InferenceData`, of ArviZ 1 a `DataTree`, from tensors that begin with axes of chains and draws.

    Its groups are `posterior`, `sample_stats` and, where it is given, `log_likelihood` with the variable "y".
    """
    try:
        import arviz
    except ImportError as error:
        raise PosterityError(
            "to_inference_data needs ArviZ. Install it with: pip install 'posterity[arviz]'."
        ) from error
    groups: dict[str, Any] = {"posterior": {name: _array(value) for name, value in values.items()}}
    if statistics:
        groups["sample_stats"] = {NAMES.get(name, name): _array(value) for name, value in statistics.items()}
    if log_likelihood is not None:
        groups["log_likelihood"] = {"y": _array(log_likelihood)}
    if int(arviz.__version__.partition(".")[0]) >= 1:
        return arviz.from_dict(groups)
    return arviz.from_dict(**groups)


def _array(tensor: Tensor) -> np.ndarray[Any, Any]:
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()  # numpy has no bfloat16
