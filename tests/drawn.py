"""Test data that are the same numbers on every device, and the states of torch's own generators."""

import torch
from torch import Tensor

from posterity.numerics import Key


def normal(key: Key, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Standard normal numbers from the CPU, on the default device: a GPU draws others by the same key."""
    return key.normal(shape, dtype, "cpu").to(torch.get_default_device())


def generator_states() -> Tensor:
    """Of the CPU and of all GPUs, as one tensor: equal as long as nothing was drawn without a key."""
    return torch.cat([torch.get_rng_state(), *torch.cuda.get_rng_state_all()])
